"""From a material to the atoms in the beam: substitution, orientation, box, vibration, columns.

    lattice, numbers = substitute(material, rng)             # other elements, the lattice to fit
    zone_axis = draw_zone_axis(material, largest, rng)
    specimen = cut(lattice, material.fractional, numbers, zone_axis, box, thickness, rms, rng)
    found = columns(specimen)

Positions are (y, x, z) [Å] in the box, z along the beam. All randomness comes from the caller's
generator, in a fixed order.
"""

from dataclasses import dataclass
from itertools import product
from math import gcd

import numpy as np
from ase.data import chemical_symbols, covalent_radii
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from scipy.spatial import cKDTree

from data_tools.structures import Material, contacts

# Elements for substitution: up to bismuth, without hydrogen, noble gases, Tc and Pm.
ELEMENTS = np.setdiff1d(np.arange(3, 84), [10, 18, 36, 54, 43, 61])
LIKE_SIZE = 4 / 3  # largest ratio of covalent radii in a substitution, either way
SAME_COLUMN = 0.2  # [Å] atoms whose ideal projections are nearer than this are one column


@dataclass(frozen=True)
class Specimen:
    """Atoms that fill a box. `ideal` are the lattice sites, `positions` the displaced atoms."""

    ideal: np.ndarray  # (atoms, 3) float64 (y, x, z) [Å]
    positions: np.ndarray  # (atoms, 3), a little outside the box where displacement took them
    numbers: np.ndarray  # (atoms,) atomic numbers
    zone_axis: tuple[int, int, int]  # [uvw] of the conventional cell


@dataclass(frozen=True)
class Columns:
    """Atomic columns in projection."""

    centres: np.ndarray  # (columns, 2) mean (y, x) of the displaced atoms [Å]
    mean_z: np.ndarray  # (columns,)
    atoms: np.ndarray  # (columns,)
    nearest: np.ndarray  # (columns,) distance to the nearest other column [Å]


def substitute(material: Material, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Replace each element by another of like size, at random, and scale the lattice to fit.

    The lattice is scaled until the tightest contact of two atoms is, in units of the sum of their
    covalent radii (Cordero et al. 2008, as tabulated by ASE), what it was in the material. So
    substituted crystals are as dense as real ones, and no atoms overlap. An element that none of
    ELEMENTS is like (hydrogen) stays.

    Returns:
        (3, 3) lattice [Å] and (atoms,) atomic numbers.
    """
    old, place = np.unique(material.numbers, return_inverse=True)
    new = np.empty_like(old)
    for index, element in enumerate(old):
        ratio = covalent_radii[ELEMENTS] / covalent_radii[element]
        like = ELEMENTS[(ratio >= 1 / LIKE_SIZE) & (ratio <= LIKE_SIZE)]
        free = np.setdiff1d(like, new[:index])
        new[index] = rng.choice(free) if len(free) else element
    pairs, shortest = contacts(material.lattice, material.fractional, material.numbers)
    before = covalent_radii[pairs].sum(axis=1) / shortest
    after = covalent_radii[new[np.searchsorted(old, pairs)]].sum(axis=1) / shortest
    return material.lattice * (after.max() / before.max()), new[place]


def reduced_formula(numbers: np.ndarray) -> str:
    """Reduced formula as pymatgen writes it."""
    from pymatgen.core import Composition

    found, counts = np.unique(numbers, return_counts=True)
    return Composition(
        {chemical_symbols[z]: int(count) for z, count in zip(found, counts, strict=True)}
    ).reduced_formula


def zone_axes(material: Material, largest: int) -> tuple[np.ndarray, np.ndarray]:
    """All lattice directions [uvw] with indices up to `largest`, and the period along each.

    Returns:
        (axes, 3) integers without common divisor, and (axes,) repeat distances [Å] (a centred
        lattice repeats sooner than its cell vectors say).
    """
    steps = range(-largest, largest + 1)
    axes = np.array([uvw for uvw in product(steps, repeat=3) if gcd(*uvw) == 1])
    lengths = np.linalg.norm(axes @ material.lattice, axis=1)
    for parts in (2, 3):  # centred lattices: halves (A, B, C, I, F) and thirds (R)
        shifts = product(range(parts), repeat=3)
        centred = {shift for shift in shifts if _repeats(material, shift, parts)}
        lengths[[tuple(axis % parts) in centred for axis in axes]] /= parts
    return axes, lengths


def draw_zone_axis(
    material: Material, largest: int, rng: np.random.Generator
) -> tuple[int, int, int]:
    """A zone axis, drawn with weight period⁻⁴.

    The columns per area grow with the period along the beam, so this prefers the axes that
    microscopists tilt to: the ones with few, dense, well separated columns.
    """
    axes, lengths = zone_axes(material, largest)
    weights = lengths**-4
    u, v, w = axes[rng.choice(len(axes), p=weights / weights.sum())]
    return int(u), int(v), int(w)


def cut(
    lattice: np.ndarray,
    fractional: np.ndarray,
    numbers: np.ndarray,
    zone_axis: tuple[int, int, int],
    box: float,
    thickness: float,
    displacement: float,
    rng: np.random.Generator,
) -> Specimen:
    """Fill a box with the crystal, [uvw] along the beam, at a random turn and offset.

    The turned lattice does not repeat with the box, so there is a seam at its lateral edges; the
    scanned field is far from them.

    Args:
        lattice: (3, 3) [Å].
        box: width in y and x [Å].
        thickness: extent along the beam [Å].
        displacement: rms thermal displacement along each axis [Å].
    """
    turned = lattice @ _rotation(np.asarray(zone_axis) @ lattice, rng.uniform(0, 2 * np.pi)).T
    offset = rng.uniform(size=3)
    size = np.array([box, box, thickness])
    corners = np.array(list(product(*((0, edge) for edge in size)))) @ np.linalg.inv(turned)
    low, high = np.floor(corners.min(axis=0)) - 1, np.ceil(corners.max(axis=0)) + 1
    cells = np.stack(np.meshgrid(*map(np.arange, low, high), indexing="ij"), axis=-1).reshape(
        -1, 1, 3
    )
    xyz = ((cells + (fractional + offset) % 1) @ turned).reshape(-1, 3)
    inside = ((xyz >= 0) & (xyz < size)).all(axis=1)
    ideal = xyz[inside][:, [1, 0, 2]]
    positions = ideal + displacement * rng.standard_normal(ideal.shape)
    return Specimen(ideal, positions, np.tile(numbers, len(cells))[inside], zone_axis)


def columns(specimen: Specimen) -> Columns:
    """The atomic columns along the beam.

    Atoms belong together by their ideal sites, which coincide in projection (within SAME_COLUMN,
    chains included: such rows cannot be told apart). The position is the mean of the displaced
    atoms: that is what the beam passed.
    """
    ideal = specimen.ideal[:, :2]
    pairs = cKDTree(ideal).query_pairs(SAME_COLUMN, output_type="ndarray")
    graph = coo_matrix((np.ones(len(pairs)), pairs.T), shape=(len(ideal), len(ideal)))
    count, label = connected_components(graph, directed=False)
    atoms = np.bincount(label, minlength=count)

    def mean(values: np.ndarray) -> np.ndarray:
        return np.bincount(label, values, count) / atoms

    centres = np.stack([mean(specimen.positions[:, axis]) for axis in (0, 1)], axis=1)
    nearest = cKDTree(centres).query(centres, k=2)[0][:, 1] if count > 1 else np.full(count, np.inf)
    return Columns(centres, mean(specimen.numbers.astype(float)), atoms, nearest)


def _repeats(material: Material, shift: tuple[int, ...], parts: int) -> bool:
    """Does a shift by `shift` / `parts` cell vectors, not zero, map the crystal onto itself?"""
    if not any(shift):
        return False
    apart = (material.fractional + np.array(shift) / parts)[:, None] - material.fractional
    apart -= np.round(apart)
    near = np.linalg.norm(apart @ material.lattice, axis=-1) < 0.05
    return bool((near & (material.numbers[:, None] == material.numbers)).any(axis=1).all())


def _rotation(axis: np.ndarray, turn: float) -> np.ndarray:
    """(3, 3) rotation that takes `axis` to z, then turns by `turn` [rad] around z."""
    z = axis / np.linalg.norm(axis)
    helper = np.eye(3)[np.argmin(np.abs(z))]
    x = np.cross(helper, z)
    x /= np.linalg.norm(x)
    upright = np.stack([x, np.cross(z, x), z])
    cos, sin = np.cos(turn), np.sin(turn)
    return np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]]) @ upright
