"""A small split of phase objects: patterns, potentials and atoms that belong together."""

from pathlib import Path

import numpy as np

from stemdl import electrons
from stemdl.data import shards

SCAN, STEP, PIXEL, BLUR = (8, 10), 0.8, 0.2, 0.3  # [Å]
SHAPE = (32, 40)
DETECTOR, BOX, GRID = (31, 31), 16.0, 0.2  # pixels; [Å]
AXES = shards.Axes(STEP, 1 / BOX * 1.5, PIXEL, BLUR)
ENERGY, SEMI_ANGLE, THICKNESS = 100.0, 20.0, 40.0  # [keV], [mrad], [Å]
SIGMA = 9.24e-4  # interaction constant at 100 keV [rad/(V Å)]


def blobs(y: np.ndarray, x: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Potential [V] of Gaussian columns (y, x, height) at coordinates [Å]."""
    return sum(
        height * np.exp(-((y - cy) ** 2 + (x - cx) ** 2) / (2 * BLUR**2))
        for cy, cx, height in columns
    )


def crystal(rng: np.random.Generator) -> np.ndarray:
    """Columns (y, x, height [V]) of a tilted rectangular lattice with two kinds of columns."""
    angle, a, b = rng.uniform(0, np.pi), *rng.uniform(2.0, 2.6, 2)
    i, j = np.meshgrid(np.arange(-9, 10), np.arange(-9, 10))
    u, v = a * i.ravel(), b * j.ravel()
    y, x = np.cos(angle) * u - np.sin(angle) * v, np.sin(angle) * u + np.cos(angle) * v
    height = np.where((i + j).ravel() % 2, *rng.uniform(15, 60, 2))
    inside = (abs(y - 3.2) < 5) & (abs(x - 4) < 6)
    return np.stack([y, x, height], -1)[inside]


def patterns(columns: np.ndarray) -> np.ndarray:
    """Patterns (Sy, Sx, Ky, Kx), fractions of the beam: a defocused probe and a phase object."""
    r = np.arange(round(BOX / GRID)) * GRID - 4.0
    k = np.fft.fftfreq(len(r), GRID)
    transmission = np.exp(1j * SIGMA * THICKNESS * blobs(r[:, None], r, columns))
    square = k[:, None] ** 2 + k**2
    wavelength = electrons.wavelength(ENERGY)
    aperture = np.sqrt(square) * wavelength <= SEMI_ANGLE * 1e-3
    lens = aperture * np.exp(-1j * np.pi * wavelength * 60 * square)
    py, px = ((np.arange(n) + 0.5) * STEP - 0.5 * PIXEL - r[0] for n in SCAN)
    shift_y, shift_x = (np.exp(-2j * np.pi * np.outer(p, k)) for p in (py, px))
    probe = np.fft.ifft2(lens * shift_y[:, None, :, None] * shift_x[None, :, None, :])
    intensity = abs(np.fft.fft2(probe * transmission)) ** 2
    intensity /= intensity.sum((-2, -1), keepdims=True)
    # Bin frequencies of 1/BOX to detector pixels of 1.5/BOX.
    place = np.rint(np.fft.fftfreq(len(r), 1 / len(r)) / 1.5).astype(int) + DETECTOR[0] // 2
    onto = (np.arange(DETECTOR[0])[:, None] == place).astype(float)
    return np.einsum("abyx,iy,jx->abij", intensity, onto, onto, optimize=True)


def write_phase_split(directory: Path, split: str, count: int, seed: int = 0) -> None:
    """One shard of `count` samples with all that evaluation reads."""
    rng = np.random.default_rng(seed)
    y, x = (np.arange(count) * PIXEL for count in SHAPE)
    samples, atoms = np.zeros(count, shards.SAMPLE), []
    cbed = np.empty((count, *SCAN, *DETECTOR), np.float32)
    potential = np.empty((count, *SHAPE), np.float32)
    formulas = ("SrTiO3", "GaN", "Fe2O3", "MgO")
    for row in range(count):
        columns = crystal(rng)
        cbed[row] = patterns(columns)
        potential[row] = blobs(y[:, None], x, columns)
        table = np.zeros(len(columns), shards.COLUMN)
        table["sample"], table["y"], table["x"] = row, columns[:, 0], columns[:, 1]
        table["atoms"], table["nearest"] = 10, 2.0
        atoms.append(table)
        formula = formulas[row % len(formulas)]
        described = {
            "material": f"P{row % 3}:{formula}",
            "prototype": f"P{row % 3}",
            "formula": formula,
            "space_group": "225",
            "zone_axis": (1, -1, 0),
            "energy": ENERGY,
            "semi_angle": SEMI_ANGLE,
            "defocus": 60,
            "thickness": THICKNESS,
            "dose": np.nan,
            "mean_z": rng.uniform(10, 60),
            "elements": 1 + row % 4,
            "index": row,
        }
        for key, value in described.items():
            samples[key][row] = value
    shards.write(
        directory / split / "00000.h5",
        cbed=cbed,
        potential=potential,
        columns=np.concatenate(atoms),
        samples=samples,
        axes=AXES,
        creator="tests",
    )
