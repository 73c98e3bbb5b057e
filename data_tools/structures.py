"""Crystals: where they come from, which are left out, and how they are split.

    catalogue = collect(settings.materials)
    splits = split(catalogue.materials, settings.materials, seed)     # {"train": [...], ...}

The split is by family. Materials of one prototype, or of one reduced formula, are one family, and
a family lies in one split as a whole. Formulas that arise by substitution of elements belong to
the split that `split_of_formula` says, so no formula is in two splits either.
"""

import hashlib
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from stemdl import schema
from stemdl.console import progress
from stemdl.errors import UserError

SPLITS = ("train", "dev", "test")
HEAVIEST = 103  # abTEM's parametrised scattering factors (Lobato and Van Dyck 2014) end at Lr
NAME_BYTES = 88  # a shard's table has 96 for a name, and a number may follow
CLOSEST = 0.6  # [Å] atoms nearer than this are a defect of the file, not a bond (H2 has 0.74)


@dataclass(frozen=True)
class Material:
    """A crystal in its conventional standard cell."""

    name: str  # unique in the catalogue
    prototype: str
    formula: str  # reduced
    space_group: int
    lattice: np.ndarray  # (3, 3) [Å], rows are the cell vectors
    fractional: np.ndarray  # (atoms, 3)
    numbers: np.ndarray  # (atoms,) atomic numbers


@dataclass(frozen=True)
class Catalogue:
    """All usable materials, and those left out with the reason."""

    materials: tuple[Material, ...]
    skipped: dict[str, str]  # name: reason

    def reasons(self) -> dict[str, int]:
        """How many were left out for each reason."""
        return dict(Counter(reason.split(":")[0] for reason in self.skipped.values()))


class Unusable(Exception):
    """A structure that cannot be simulated; says why."""


Source = tuple[str, str | None, Any]  # name, prototype if known, pymatgen Structure or Unusable


def collect(settings: schema.Materials) -> Catalogue:
    """Read every source of materials that the settings name. One that cannot be used is skipped.

    Raises:
        UserError: the CIF folder is missing, or nothing is left.
    """
    sources: list[tuple[str, Iterable[Source]]] = []
    if settings.prototypes:
        sources.append(("prototypes", _prototypes()))
    if settings.cif_dir is not None:
        sources.append(("CIF files", _cifs(Path(settings.cif_dir))))
    found: dict[str, Material] = {}
    skipped: dict[str, str] = {}
    for what, source in sources:
        for name, prototype, structure in progress(source, what, unit="structure"):
            name = _unique(name, found.keys() | skipped.keys())
            try:
                if isinstance(structure, Unusable):
                    raise structure
                found[name] = standardise(name, prototype, structure, settings.max_cell_atoms)
            except Unusable as reason:
                skipped[name] = str(reason)
    if not found:
        raise UserError(
            f"simulate.materials: no usable structure ({len(skipped)} left out); "
            "set prototypes: true, or cif_dir to a folder with CIF files of ordered crystals"
        )
    return Catalogue(tuple(found.values()), skipped)


def standardise(name: str, prototype: str | None, structure: Any, max_atoms: int) -> Material:
    """A pymatgen structure in its conventional standard cell, checked for simulation.

    A structure with no `prototype` gets a label in the manner of AFLOW's: anonymous formula, atoms
    in the cell, space group.

    Raises:
        Unusable: says why.
    """
    from pymatgen.symmetry.analyzer import SpacegroupAnalyzer

    if not structure.is_ordered:
        raise Unusable("partial occupancy")
    try:
        heaviest = max(site.specie.Z for site in structure)
        analysis = SpacegroupAnalyzer(structure)
        cell = analysis.get_conventional_standard_structure()
        space_group = analysis.get_space_group_number()
    except Exception as error:  # pymatgen and spglib raise many kinds for the same cause
        raise Unusable(f"no symmetry found: {_one_line(error)}") from error
    if len(cell) > max_atoms:
        raise Unusable(f"cell too large: {len(cell)} atoms, at most {max_atoms}")
    if heaviest > HEAVIEST:
        raise Unusable(f"element too heavy: Z = {heaviest}")
    if heaviest == 1:
        raise Unusable("hydrogen alone: scatters too weakly")
    numbers = np.array([site.specie.Z for site in cell])
    material = Material(
        name=name,
        prototype=prototype or f"{cell.composition.anonymized_formula}_{len(cell)}_{space_group}",
        formula=cell.composition.reduced_formula,
        space_group=space_group,
        lattice=np.array(cell.lattice.matrix),
        fractional=np.array(cell.frac_coords) % 1,
        numbers=numbers,
    )
    if contacts(material.lattice, material.fractional, numbers)[1].min() < CLOSEST:
        raise Unusable(f"atoms too close: nearer than {CLOSEST} Å")
    return material


def contacts(
    lattice: np.ndarray, fractional: np.ndarray, numbers: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The shortest distance of each pair of elements.

    Returns:
        (pairs, 2) atomic numbers and (pairs,) distances [Å]; an element pairs with itself too.
    """
    images = np.stack(np.meshgrid(*[[-1, 0, 1]] * 3, indexing="ij"), axis=-1).reshape(-1, 3)
    apart = fractional[:, None] - fractional[None]
    apart -= np.round(apart)
    distances = np.linalg.norm((apart[:, :, None] + images) @ lattice, axis=-1)
    itself = np.arange(len(numbers))
    distances[itself, itself, len(images) // 2] = np.inf
    nearest = distances.min(axis=-1)
    pairs = [(a, b) for a in np.unique(numbers) for b in np.unique(numbers) if a <= b]
    shortest = [nearest[numbers == a][:, numbers == b].min() for a, b in pairs]
    return np.array(pairs), np.array(shortest)


def split(
    materials: Sequence[Material], settings: schema.Materials, seed: int
) -> dict[str, list[Material]]:
    """Deal whole families to train, dev and test, at random by the seed.

    Held-out splits are filled up to their fraction of the materials (at least one), families that
    no longer fit go to train.

    Raises:
        UserError: a split that has samples to make gets no material.
    """
    family = _families(materials)
    members = [np.flatnonzero(family == each) for each in range(family.max() + 1)]
    room = {
        "test": max(1, round(settings.test_fraction * len(materials))),
        "dev": max(1, round(settings.dev_fraction * len(materials))),
    }
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, len(materials)])))
    dealt: dict[str, list[Material]] = {name: [] for name in SPLITS}
    for each in rng.permutation(len(members)):
        fits = [name for name, left in room.items() if len(members[each]) <= left]
        name = fits[0] if fits else "train"
        if fits:
            room[name] -= len(members[each])
        dealt[name] += [materials[index] for index in members[each]]
    for name, chosen in dealt.items():
        if not chosen:
            raise UserError(
                f"simulate.materials: no family of materials is left for {name} "
                f"({len(materials)} materials in {len(members)} families); add materials, "
                "or set prototypes: true"
            )
    return dealt


def natural_splits(splits: dict[str, list[Material]]) -> dict[str, str]:
    """The split of each formula that a material has of itself."""
    return {material.formula: name for name, chosen in splits.items() for material in chosen}


def split_of_formula(
    formula: str, natural: dict[str, str], settings: schema.Materials, seed: int
) -> str:
    """The split that a formula belongs to: its material's, or else one drawn by its hash."""
    if formula in natural:
        return natural[formula]
    digest = hashlib.sha256(f"{seed}:{formula}".encode()).digest()
    place = int.from_bytes(digest[:8], "big") / 2**64
    if place < settings.test_fraction:
        return "test"
    return "dev" if place < settings.test_fraction + settings.dev_fraction else "train"


def _families(materials: Sequence[Material]) -> np.ndarray:
    """(materials,) family numbers: connected by a common prototype or a common formula.

    The prototype counts by what is seen of it: two labels with the same anonymous formula, cell
    and space group are one family.
    """
    keys: dict[tuple[int, str], int] = {}
    rows, columns = [], []
    for row, material in enumerate(materials):
        for key in enumerate((material.formula, material.prototype, _likeness(material))):
            rows.append(row)
            columns.append(len(materials) + keys.setdefault(key, len(keys)))
    size = len(materials) + len(keys)
    graph = coo_matrix((np.ones(len(rows)), (rows, columns)), shape=(size, size))
    labels = connected_components(graph, directed=False)[1][: len(materials)]
    return np.unique(labels, return_inverse=True)[1]


def _likeness(material: Material) -> str:
    amounts = sorted(np.unique(material.numbers, return_counts=True)[1])
    return f"{amounts}_{material.space_group}"


def _prototypes() -> Iterator[Source]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pymatgen.analysis.prototypes import AFLOW_PROTOTYPE_LIBRARY

    for entry in AFLOW_PROTOTYPE_LIBRARY:
        structure = entry["snl"].structure
        prototype = entry["tags"]["aflow"]
        yield f"{prototype} {structure.composition.reduced_formula}", prototype, structure


def _cifs(folder: Path) -> Iterator[Source]:
    """Every CIF below a folder, in the order of names; an Unusable where a file cannot be read."""
    from pymatgen.core import Structure

    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; set simulate.materials.cif_dir")
    for path in sorted(folder.rglob("*.cif")):
        name = path.relative_to(folder).with_suffix("").as_posix()
        name = name.encode()[-NAME_BYTES:].decode(errors="ignore")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                yield name, None, Structure.from_file(path)
            except Exception as error:  # the parser raises whatever the text makes it raise
                yield name, None, Unusable(f"not a readable CIF: {_one_line(error)}")


def _unique(name: str, taken: Set[str]) -> str:
    number = 1
    while (unique := name if number == 1 else f"{name} ({number})") in taken:
        number += 1
    return unique


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
