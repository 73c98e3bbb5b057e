"""What a sample costs: operations counted, their pace measured, a whole run foretold.

    work = operations(settings, slices=20, elements=2)     # (2,) preparation, propagation
    pace = measure(recipe, material, "train", index)       # (2,) seconds an operation, here and now
    work @ pace                                            # seconds a sample

Two kinds of work run at two speeds. *Preparation* is what a specimen needs once: potential and
transmission functions, by abTEM. *Propagation* is what each probe position needs: transforms
through all slices, and the binning of its pattern. A sample has one configuration of thermal
displacements.
"""

import time
from collections.abc import Iterable

import numpy as np

from data_tools.multislice import antialias_reach, grid_points
from data_tools.sample import Recipe, drawn_thickness, simulate_sample, slice_count
from data_tools.structures import Material
from stemdl import schema

PAPER_SAMPLES = 930_000  # of Laanait et al. 2019, arXiv:1909.11150: training, dev and test
ROUNDS = 3  # of a measurement: more until SHORT has passed, fewer once LONG has
SHORT, LONG = 0.5, 10.0  # [s]
SCANS = (2, 2), (8, 8)  # few probe positions, and as many as a GPU propagates together


def operations(settings: schema.Simulate, slices: int, elements: int) -> np.ndarray:
    """Floating-point operations of one sample.

    A complex transform of length n counts 5 n log2 n (FFTW's convention), a complex product 6. With
    n grid points, and m of n frequencies inside the antialias aperture along each axis:

    - A probe position, each slice: 2 (n + m) transforms of length n, to the grid and back; products
      with the transmission function (n, n) and the propagator (m, n).
    - A probe position, once: entrance and intensity (m, m), and their binning by two matrices.
    - A slice: for each element a transform of the atoms' positions to frequencies and back; a
      transmission function, limited to the aperture by a transform and back.

    Args:
        slices: that the specimen is cut into.
        elements: different elements in the specimen.

    Returns:
        (2,) float64, preparation and propagation.
    """
    n = grid_points(settings.box, settings.grid)
    m = 2 * antialias_reach(n) + 1
    transform = 5 * n * np.log2(n)
    image, (ky, kx) = 2 * n * transform, settings.detector
    once = 15 * m**2 + 2 * ky * m * (m + kx)
    through = slices * (2 * (n + m) * transform + 6 * n * (n + m))
    preparation = slices * (elements + 1) * (2 * image + 6 * n**2)
    return np.array([preparation, settings.scan[0] * settings.scan[1] * (through + once)])


def of_sample(recipe: Recipe, material: Material, split: str, index: int) -> np.ndarray:
    """`operations` of what `simulate_sample` makes with these arguments; costs a millisecond."""
    thickness = drawn_thickness(recipe, material, split, index)
    slices = slice_count(thickness, recipe.settings.slice_thickness)
    return operations(recipe.settings, slices, len(np.unique(material.numbers)))


def of_samples(tasks: Iterable[tuple[Recipe, Material, str, int]]) -> np.ndarray:
    """The sum of `of_sample` over some samples, such as those of a shard."""
    return np.sum([of_sample(*task) for task in tasks], axis=0)


def measure(recipe: Recipe, material: Material, split: str, index: int) -> np.ndarray:
    """The pace of this core or GPU, by really making this sample with few probe positions.

    The difference of few and more positions is propagation, the rest is preparation.

    Returns:
        (2,) float64, seconds an operation of preparation and of propagation.
    """
    few, more = (
        Recipe(recipe.settings.model_copy(update={"scan": scan}), recipe.natural) for scan in SCANS
    )
    simulate_sample(few, material, split, index)  # plans, tables and compiled code come to be
    times: list[list[float]] = []
    started, passed = time.perf_counter(), 0.0
    while passed < SHORT or (len(times) < ROUNDS and passed < LONG):
        times.append([_timed(each, material, split, index) for each in (few, more)])
        passed = time.perf_counter() - started
    seconds = np.median(times, axis=0)
    work = np.stack([of_sample(each, material, split, index) for each in (few, more)])
    return np.maximum(np.linalg.solve(work, seconds), 0)


def _timed(recipe: Recipe, material: Material, split: str, index: int) -> float:
    started = time.perf_counter()
    simulate_sample(recipe, material, split, index)
    return time.perf_counter() - started
