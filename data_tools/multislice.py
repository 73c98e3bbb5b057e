"""Multislice of many probes through one specimen: abTEM's physics, a slice loop of its own.

    engine = Engine(points=120, box=24)
    potential = engine.potential(specimen, slices)        # abTEM's sliced potential
    patterns = engine.patterns(potential, optics, positions, weights_y, weights_x)

Potential, probe, transmission functions, propagator and antialias aperture are abTEM's. The loop
over slices is here because it is nearly all of the time, and can be had cheaper at equal output:

- Waves are band-limited by the antialias aperture to two thirds of the frequencies along an axis.
  Transforms along y therefore run over those columns only, and the spectrum is kept compact.
- The aperture rides on the propagator, the transforms' scale too, and a pattern is binned from the
  last transform: 40 transforms for 20 slices, with nothing between but two multiplications.
- A few waves at a time go through all slices, so that they stay in a core's cache.

Arrays go (y, x): abTEM calls its first axis x and is given the atoms' y there.
"""

from dataclasses import dataclass
from typing import Any

import abtem
import numpy as np
import pyfftw
from abtem.antialias import AntialiasAperture, antialias_aperture
from abtem.core import config
from abtem.core.backend import asnumpy, get_array_module
from abtem.integrals import ScatteringFactorProjectionIntegrals
from abtem.multislice import FresnelPropagator
from ase import Atoms
from scipy.fft import next_fast_len

from data_tools.optics import Optics
from data_tools.specimen import Specimen

WAVES = {"cpu": 4, "gpu": 256}  # probes that travel together: a core's cache, a GPU's width


def grid_points(box: float, sampling: float) -> int:
    """The least even number of points that samples `box` so finely and transforms fast."""
    points = int(np.ceil(box / sampling - 1e-9))
    while (fast := next_fast_len(points)) % 2:
        points = fast + 1
    return fast


def device() -> str:
    """ "gpu" where CuPy and a GPU are there, else "cpu"."""
    try:
        import cupy

        return "gpu" if cupy.cuda.runtime.getDeviceCount() else "cpu"
    except Exception:  # no CuPy, or CuPy without a driver, which raises its own kinds
        return "cpu"


def antialias_reach(points: int) -> int:
    """The highest frequency inside abTEM's antialias aperture, in units of 1/box."""
    aperture = antialias_aperture((points, points), (1.0, 1.0), np)
    return int(np.flatnonzero(aperture[0, : points // 2])[-1])


def repeatable() -> Any:
    """abTEM's settings for the same bits in every run: plans by rule, not by stopwatch."""
    return config.set({"fft": "fftw", "fftw.planning_effort": "FFTW_ESTIMATE", "fftw.threads": 1})


@dataclass(frozen=True)
class Beam:
    """What the optics and the potential decide, for all probes of a specimen.

    Spectra are compact and centred: frequencies -reach ... reach along each axis [1/box].
    """

    probe: Any  # (m, m) complex64, a probe at the origin of the box; its squares add up to 1
    propagator: Any  # (m, m) complex64, through one slice, with the antialias aperture
    transmission: Any  # (slices, n, n) complex64, band-limited


class Engine:
    """Multislice on one square grid. Holds plans, buffers and scattering factors: one a process."""

    def __init__(self, points: int, box: float, device: str = "cpu") -> None:
        """
        Args:
            points: grid points along each axis of the box.
            box: width of the box [Å].
            device: "cpu" (FFTW) or "gpu" (CuPy).
        """
        self.points, self.box, self.device = points, box, device
        self.reach = antialias_reach(points)
        self._integrator = ScatteringFactorProjectionIntegrals("lobato")
        self._planned = Planned(points, self.reach) if device == "cpu" else None

    def potential(self, specimen: Specimen, thickness: float, slices: int) -> abtem.PotentialArray:
        """The independent-atom potential; each atom is projected into the slice that holds it.

        Args:
            thickness: of the specimen [Å], cut into `slices` of equal thickness.

        Returns:
            abTEM's array (slices, n, n) [V Å].
        """
        positions = specimen.positions.copy()
        positions[:, :2] %= self.box
        positions[:, 2] = np.clip(positions[:, 2], 0, np.nextafter(thickness, 0))
        atoms = Atoms(specimen.numbers, positions, cell=[self.box, self.box, thickness], pbc=True)
        with repeatable():
            return abtem.Potential(
                atoms,
                gpts=self.points,
                slice_thickness=(thickness / slices,) * slices,
                integrator=self._integrator,
                device=self.device,
            ).build(lazy=False)

    def projected(self, potential: abtem.PotentialArray) -> np.ndarray:
        """The potential summed along the beam: (n, n) float64 [V Å]."""
        return asnumpy(potential.array).sum(axis=0, dtype=np.float64)

    def patterns(
        self,
        potential: abtem.PotentialArray,
        optics: Optics,
        positions: np.ndarray,
        weights: tuple[np.ndarray, np.ndarray],
    ) -> np.ndarray:
        """Diffraction patterns of probes at some positions.

        Args:
            potential: of one slice thickness.
            positions: (probes, 2) (y, x) [Å] in the box.
            weights: (Ky, m) and (Kx, m), what each detector pixel takes of each frequency, with
                m = 2 * reach + 1; see optics.detector_weights.

        Returns:
            (probes, Ky, Kx) float32, fraction of the beam on each pixel.
        """
        beam = self._beam(potential, optics)
        xp = get_array_module(beam.probe)
        propagate = full_grid if self._planned is None else self._planned.propagate
        frequencies = np.arange(-self.reach, self.reach + 1) / self.box
        ramps = np.exp(-2j * np.pi * positions[..., None] * frequencies).astype(np.complex64)
        to_ky, to_kx = (xp.asarray(each) for each in weights)
        out = np.empty((len(positions), len(to_ky), len(to_kx)), np.float32)
        waves = WAVES[self.device]
        for first in range(0, len(positions), waves):
            ramp = xp.asarray(ramps[first : first + waves])
            spectra = propagate(beam, beam.probe * ramp[:, 0, :, None] * ramp[:, 1, None, :])
            intensity = spectra.real**2 + spectra.imag**2
            out[first : first + waves] = asnumpy(to_ky @ intensity @ to_kx.T)
        return out

    def _beam(self, potential: abtem.PotentialArray, optics: Optics) -> Beam:
        probe = abtem.Probe(
            energy=optics.energy * 1e3,
            semiangle_cutoff=optics.semi_angle,
            defocus=optics.defocus,
            Cs=optics.cs,
            gpts=self.points,
            extent=self.box,
            device=self.device,
        )
        with repeatable():
            wave = probe.build(scan=(0.0, 0.0), lazy=False)
            transmission = potential.transmission_function(probe.energy)
            transmission = AntialiasAperture().bandlimit(transmission, in_place=True).array
            step = FresnelPropagator().get_array(wave, potential.slice_thickness[0])
        xp = get_array_module(step)
        spectrum = self._compact(xp.fft.fft2(wave.array.reshape(step.shape)))
        spectrum /= xp.sqrt((xp.abs(spectrum) ** 2).sum())
        scale = self.points**-2  # of the inverse transform, which goes without
        return Beam(
            probe=spectrum.astype(np.complex64),
            propagator=(self._compact(step) * scale).astype(np.complex64),
            transmission=transmission.astype(np.complex64),
        )

    def _compact(self, spectrum: Any) -> Any:
        frequencies = np.arange(-self.reach, self.reach + 1)
        return spectrum[np.ix_(frequencies, frequencies)]


class Planned:
    """FFTW's plans between compact spectra (m, m) and waves on the grid (n, n).

    A spectrum lies in the first m rows and columns of its buffer, frequency -reach at 0. That is a
    shift of all frequencies, so the wave on the grid carries a phase ramp, which the way back
    takes off again. What lies beyond m in `spectrum` and `columns` is zero and stays so.
    """

    def __init__(self, points: int, reach: int) -> None:
        m = 2 * reach + 1
        buffers = [
            pyfftw.zeros_aligned((WAVES["cpu"], points, points), "complex64") for _ in range(4)
        ]
        spectrum, columns, self._wave, rows = buffers
        self._spectrum = spectrum[:, :m, :m]
        self._arriving = self._wave[:, :m, :m]

        def plan(source: np.ndarray, target: np.ndarray, axis: int, direction: str) -> Any:
            flags = ("FFTW_ESTIMATE",)  # plans by rule: the same bits in every run
            return pyfftw.FFTW(source, target, (axis,), f"FFTW_{direction}", flags, threads=1)

        self._to_grid = (
            plan(spectrum[:, :, :m], columns[:, :, :m], 1, "BACKWARD"),
            plan(columns, self._wave, 2, "BACKWARD"),
        )
        self._to_spectrum = (
            plan(self._wave, rows, 2, "FORWARD"),
            plan(rows[:, :, :m], self._wave[:, :, :m], 1, "FORWARD"),
        )

    def propagate(self, beam: Beam, spectra: np.ndarray) -> np.ndarray:
        """Exit spectra (waves, m, m) of at most WAVES entrance spectra."""
        count = len(spectra)
        self._spectrum[:count] = spectra
        for transmission in beam.transmission:
            for transform in self._to_grid:
                transform.execute()
            self._wave *= transmission
            for transform in self._to_spectrum:
                transform.execute()
            np.multiply(self._arriving, beam.propagator, out=self._spectrum)
        return self._spectrum[:count]


def full_grid(beam: Beam, spectra: Any) -> Any:
    """What Planned.propagate does, in plain array operations for any array module (CuPy)."""
    xp = get_array_module(spectra)
    count, m, _ = spectra.shape
    points = beam.transmission.shape[-1]
    wave = xp.zeros((count, points, points), np.complex64)
    for transmission in beam.transmission:
        wave[:, :m, :m] = spectra
        wave = xp.fft.fft2(xp.fft.ifft2(wave, norm="forward") * transmission)
        spectra = wave[:, :m, :m] * beam.propagator
        wave[...] = 0
    return spectra
