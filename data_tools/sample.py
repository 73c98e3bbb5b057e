"""One simulated sample: from a material and an index to patterns, potential and columns.

    sample = simulate_sample(Recipe(settings, natural), material, "train", index)

A sample depends on its material and on (simulate.seed, index) alone, never on other samples.
"""

from dataclasses import asdict, dataclass
from functools import lru_cache

import numpy as np

from data_tools.multislice import Engine, antialias_reach, device, grid_points
from data_tools.optics import (
    Optics,
    detector_weights,
    field_start,
    scan_positions,
)
from data_tools.specimen import (
    Columns,
    Specimen,
    columns,
    cut,
    draw_zone_axis,
    reduced_formula,
    substitute,
)
from data_tools.structures import Material, split_of_formula
from stemdl import schema
from stemdl.data import shards
from stemdl.electrons import spatial_frequency
from stemdl.errors import UserError

TRIES = 200  # substitutions drawn until one belongs to the sample's split


@dataclass(frozen=True)
class Recipe:
    """What all samples share."""

    settings: schema.Simulate
    natural: dict[str, str]  # split of each material's own formula


@dataclass(frozen=True)
class Scene:
    """A specimen under the microscope."""

    specimen: Specimen
    formula: str
    optics: Optics
    thickness: float  # [Å]
    dose: float  # [e/Å²], NaN when noiseless


@dataclass(frozen=True)
class Sample:
    cbed: np.ndarray  # (Sy, Sx, Ky, Kx) in the stored dtype
    potential: np.ndarray  # (H, W) float32 [V]
    columns: np.ndarray  # COLUMN records of row 0
    record: np.ndarray  # () SAMPLE record


def simulate_sample(recipe: Recipe, material: Material, split: str, index: int) -> Sample:
    """One sample; the same for the same arguments, wherever it is made."""
    settings = recipe.settings
    rng = _generator(settings.seed, index)
    scene = draw(recipe, material, split, rng)
    patterns, projected = image(scene, settings)
    record = np.zeros((), shards.SAMPLE)
    for key, value in {
        "material": material.name.encode(),
        "prototype": material.prototype.encode(),
        "formula": scene.formula.encode(),
        "space_group": str(material.space_group).encode(),
        "zone_axis": scene.specimen.zone_axis,
        **asdict(scene.optics),
        "thickness": scene.thickness,
        "dose": scene.dose,
        "mean_z": scene.specimen.numbers.mean(),
        "elements": len(np.unique(scene.specimen.numbers)),
        "seed": settings.seed,
        "index": index,
    }.items():
        record[key] = value
    return Sample(
        cbed=stored(patterns, settings, scene.dose, rng),
        potential=field_potential(projected, scene.thickness, settings),
        columns=field_columns(columns(scene.specimen), settings),
        record=record,
    )


def draw(recipe: Recipe, material: Material, split: str, rng: np.random.Generator) -> Scene:
    """What is simulated, drawn from the ranges of the settings."""
    settings = recipe.settings
    lattice, numbers, formula = _draw_elements(recipe, material, split, rng)
    optics, thickness = _draw_optics(settings, rng), rng.uniform(*settings.thickness)
    dose = np.nan if settings.dose is None else np.exp(rng.uniform(*np.log(settings.dose)))
    zone_axis = draw_zone_axis(material, settings.max_zone_index, rng)
    specimen = cut(
        lattice,
        material.fractional,
        numbers,
        zone_axis,
        settings.box,
        thickness,
        settings.displacement,
        rng,
    )
    return Scene(specimen, formula, optics, thickness, dose)


def drawn_thickness(recipe: Recipe, material: Material, split: str, index: int) -> float:
    """The thickness that `simulate_sample` draws with these arguments [Å]."""
    settings = recipe.settings
    if settings.thickness[0] == settings.thickness[1]:
        return settings.thickness[0]
    rng = _generator(settings.seed, index)
    _draw_elements(recipe, material, split, rng)
    _draw_optics(settings, rng)
    return rng.uniform(*settings.thickness)


def image(scene: Scene, settings: schema.Simulate) -> tuple[np.ndarray, np.ndarray]:
    """The multislice simulation of a scene, noiseless.

    Returns:
        (Sy * Sx, Ky, Kx) float32 patterns, fraction of the beam on each pixel; and the (n, n)
        float64 potential on the grid of the box, summed along the beam [V Å].
    """
    engine = _engine(grid_points(settings.box, settings.grid), settings.box, device())
    potential = engine.potential(
        scene.specimen, scene.thickness, slice_count(scene.thickness, settings.slice_thickness)
    )
    patterns = engine.patterns(
        potential,
        scene.optics,
        scan_positions(settings.scan, settings.scan_step, settings.box),
        (
            detector_weights(settings.detector[0], settings.detector_bin, engine.reach),
            detector_weights(settings.detector[1], settings.detector_bin, engine.reach),
        ),
    )
    return patterns, engine.projected(potential)


def slice_count(thickness: float, slice_thickness: float) -> int:
    """Slices of equal thickness, at most `slice_thickness` each."""
    return int(np.ceil(thickness / slice_thickness - 1e-9))


def stored(
    patterns: np.ndarray, settings: schema.Simulate, dose: float, rng: np.random.Generator
) -> np.ndarray:
    """Patterns as a shard holds them, with Poisson noise if there is a dose.

    Floats hold the fraction of the beam on a pixel times the number of pixels: 1 is the beam spread
    evenly over the detector, whatever the dose, which suits float16 and training on many doses.
    uint16 holds the electrons counted.

    Args:
        patterns: (probes, Ky, Kx), fraction of the beam on each pixel.
        dose: [e/Å²], NaN for noiseless.

    Returns:
        (Sy, Sx, Ky, Kx) of settings.dtype.

    Raises:
        UserError: a pixel is too bright for the dtype.
    """
    dtype = np.dtype(settings.dtype)
    values, beam = patterns.astype(np.float64), dose * settings.scan_step**2  # electrons a probe
    if not np.isnan(dose):
        values = rng.poisson(values * beam) / beam
    values *= beam if dtype.kind == "u" else patterns.shape[1] * patterns.shape[2]
    most = np.iinfo(dtype).max if dtype.kind == "u" else np.finfo(dtype).max
    if values.max() > most:
        raise UserError(
            f"simulate.dtype: {dtype} holds values up to {most:.0f}, a pixel has "
            f"{values.max():.0f}; set simulate.dtype: float32"
            + (" or lower simulate.dose" if dtype.kind == "u" else "")
        )
    values = np.rint(values) if dtype.kind == "u" else values
    return values.astype(dtype).reshape(*settings.scan, *patterns.shape[1:])


def field_potential(
    projected: np.ndarray, thickness: float, settings: schema.Simulate
) -> np.ndarray:
    """The ground truth: mean potential along the beam, blurred, on the pixels of the field.

    Blur and resampling are exact for the periodic box: its Fourier series, times the Gaussian's
    transform, evaluated at the centres of the pixels.

    Args:
        projected: (n, n), summed over the thickness, on the grid of the box [V Å].

    Returns:
        (H, W) float32 [V].
    """
    points = len(projected)
    frequencies = np.fft.fftfreq(points, settings.box / points)
    blur = np.exp(-2 * (np.pi * settings.potential_blur * frequencies) ** 2)
    waves = []
    for count in settings.scan:
        pixels = round(count * settings.scan_step / settings.potential_pixel)
        start = field_start(settings.box, count, settings.scan_step)
        centres = start + (np.arange(pixels) + 0.5) * settings.potential_pixel
        waves.append(np.exp(2j * np.pi * np.outer(centres, frequencies)) * blur / points)
    spectrum = np.fft.fft2(projected.astype(np.float64) / thickness)
    return (waves[0] @ spectrum @ waves[1].T).real.astype(np.float32)


def field_columns(found: Columns, settings: schema.Simulate) -> np.ndarray:
    """COLUMN records of the columns in the scanned field, in the potential's coordinates."""
    size = np.array(settings.scan) * settings.scan_step
    start = (settings.box - size) / 2
    inside = ((found.centres >= start) & (found.centres < start + size)).all(axis=1)
    records = np.zeros(int(inside.sum()), shards.COLUMN)
    centres = found.centres[inside] - start - settings.potential_pixel / 2
    records["y"], records["x"] = centres.T
    records["mean_z"] = found.mean_z[inside]
    records["atoms"] = found.atoms[inside]
    records["nearest"] = found.nearest[inside]
    return records


def check(settings: schema.Simulate) -> None:
    """Settings that are each right but do not go together.

    Raises:
        UserError: names the keys and the arithmetic.
    """
    limit = antialias_reach(grid_points(settings.box, settings.grid)) / settings.box
    edge = max(settings.detector) * settings.detector_bin / 2 / settings.box
    if edge > limit:
        raise UserError(
            f"simulate.detector: {max(settings.detector)} pixels of {settings.detector_bin}/"
            f"{settings.box:g} Å⁻¹ reach {edge:.3f} Å⁻¹, but simulate.grid {settings.grid:g} Å "
            f"holds {limit:.3f} Å⁻¹; use fewer pixels or a finer grid"
        )
    aperture = spatial_frequency(settings.semi_angle[1], settings.energy[1])
    if aperture > limit:
        raise UserError(
            f"simulate.semi_angle: {settings.semi_angle[1]:g} mrad is {aperture:.3f} Å⁻¹, but "
            f"simulate.grid {settings.grid:g} Å holds {limit:.3f} Å⁻¹; use a finer grid"
        )
    for count in settings.scan:
        width = count * settings.scan_step
        if width > settings.box:
            raise UserError(
                f"simulate.scan: {count} positions of {settings.scan_step:g} Å are {width:g} Å, "
                f"wider than simulate.box {settings.box:g} Å"
            )
        pixels = width / settings.potential_pixel
        if abs(pixels - round(pixels)) > 1e-6 or pixels < 1:
            raise UserError(
                f"simulate.potential_pixel: the field of {width:g} Å holds {pixels:g} pixels of "
                f"{settings.potential_pixel:g} Å, wanted a whole number"
            )


def _generator(seed: int, index: int) -> np.random.Generator:
    """A sample's own random numbers."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, index])))


def _draw_optics(settings: schema.Simulate, rng: np.random.Generator) -> Optics:
    return Optics(
        energy=rng.uniform(*settings.energy),
        semi_angle=rng.uniform(*settings.semi_angle),
        defocus=rng.uniform(*settings.defocus),
        cs=rng.uniform(*settings.cs),
    )


def _draw_elements(
    recipe: Recipe, material: Material, split: str, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, str]:
    """The material itself or one with other elements, whose formula belongs to the split.

    Returns:
        (3, 3) lattice [Å], (atoms,) atomic numbers, reduced formula.
    """
    chosen, seed = recipe.settings.materials, recipe.settings.seed
    if rng.uniform() < chosen.substitute:
        for _ in range(TRIES):
            lattice, numbers = substitute(material, rng)
            formula = reduced_formula(numbers)
            if split_of_formula(formula, recipe.natural, chosen, seed) == split:
                return lattice, numbers, formula
    return material.lattice, material.numbers, material.formula


@lru_cache(maxsize=1)
def _engine(points: int, box: float, on: str) -> Engine:
    """Plans and tables are made once a process."""
    return Engine(points, box, on)
