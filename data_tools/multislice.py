"""Multislice of many probes through one specimen: abTEM's physics, a slice loop of its own.

    engine = Engine(points=120, box=24)
    potential = engine.potential(specimen, thickness=40, slices=20)   # abTEM's sliced potential
    patterns = engine.patterns(potential, optics, positions, (weights_y, weights_x))

Potential, probe, transmission functions, propagator and antialias aperture are abTEM's. The loop
over slices is here because it is nearly all of the time, and can be had cheaper at equal output:

- The antialias aperture holds two thirds of the frequencies along each axis. Transforms along y
  run over those columns only.
- The aperture rides on the propagator, and so does the scale of the transforms. A pattern is
  binned from the last transform: nothing but two multiplications lies between the transforms.
- A wave goes through all slices before the next one, so that it stays in a core's cache.

Arrays go (y, x): abTEM calls its first axis x and is given the atoms' y there.
"""

from dataclasses import dataclass
from functools import cache
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

WAVES = 64  # probes in memory at a time; a GPU propagates them together


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


def use_gpu(number: int) -> None:
    """Take one of this machine's GPUs, counted round."""
    import cupy

    cupy.cuda.Device(number % cupy.cuda.runtime.getDeviceCount()).use()


@cache
def antialias_reach(points: int) -> int:
    """The highest frequency inside abTEM's antialias aperture, in units of 1/box."""
    aperture = antialias_aperture((points, points), (1.0, 1.0), np)
    return int(np.flatnonzero(aperture[0, : points // 2])[-1])


def repeatable() -> Any:
    """abTEM's setting for the same bits in every run: it plans FFTW's transforms by stopwatch."""
    return config.set({"fft": "numpy"})


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

    def potential(self, specimen: Specimen, thickness: float, slices: int) -> Any:
        """The independent-atom potential; each atom is projected into the slice that holds it.

        Args:
            thickness: of the specimen [Å], cut into `slices` of equal thickness.

        Returns:
            abTEM's PotentialArray, (slices, n, n) [V Å].
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

    def projected(self, potential: Any) -> np.ndarray:
        """The potential summed along the beam: (n, n) float64 [V Å]."""
        return asnumpy(potential.array).sum(axis=0, dtype=np.float64)

    def patterns(
        self,
        potential: Any,
        optics: Optics,
        positions: np.ndarray,
        weights: tuple[np.ndarray, np.ndarray],
    ) -> np.ndarray:
        """Diffraction patterns of probes at some positions.

        Args:
            potential: from the method of that name.
            positions: (probes, 2) (y, x) [Å] in the box.
            weights: (Ky, m) and (Kx, m), what each detector pixel takes of each frequency, with
                m = 2 * reach + 1; see optics.detector_weights.

        Returns:
            (probes, Ky, Kx) float32, fraction of the beam on each pixel.
        """
        beam = self._beam(potential, optics)
        xp = get_array_module(beam.probe)
        frequencies = np.arange(-self.reach, self.reach + 1) / self.box
        ramps = np.exp(-2j * np.pi * positions[..., None] * frequencies).astype(np.complex64)
        to_ky, to_kx = (xp.asarray(each) for each in weights)
        propagate = propagate_on_gpu if self._planned is None else self._planned.propagate
        out = np.empty((len(positions), len(to_ky), len(to_kx)), np.float32)
        for first in range(0, len(positions), WAVES):
            ramp = xp.asarray(ramps[first : first + WAVES])
            exits = propagate(beam, beam.probe * ramp[:, 0, :, None] * ramp[:, 1, None, :])
            intensity = exits.real**2 + exits.imag**2
            out[first : first + WAVES] = asnumpy(to_ky @ intensity @ to_kx.T)
        return out

    def _beam(self, potential: Any, optics: Optics) -> Beam:
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
            transmission = potential.transmission_function(optics.energy * 1e3)
            AntialiasAperture().bandlimit(transmission, in_place=True)
            step = FresnelPropagator().get_array(wave, potential.slice_thickness[0])
        xp = get_array_module(step)
        spectrum = self._compact(xp.fft.fft2(wave.array.reshape(step.shape)))
        spectrum /= xp.sqrt((xp.abs(spectrum) ** 2).sum())
        scale = self.points**-2  # of the inverse transform, which goes without
        return Beam(
            probe=spectrum.astype(np.complex64),
            propagator=(self._compact(step) * scale).astype(np.complex64),
            transmission=transmission.array.astype(np.complex64),
        )

    def _compact(self, spectrum: Any) -> Any:
        kept = slice(self.points // 2 - self.reach, self.points // 2 + self.reach + 1)
        return get_array_module(spectrum).fft.fftshift(spectrum)[kept, kept]


class Planned:
    """FFTW's plans between the spectrum of one wave and the wave on the grid (n, n).

    A spectrum lies in the first m rows and columns of its buffer, frequency -reach at 0. That is a
    shift of all frequencies, so the wave on the grid carries a phase ramp, which the way back
    takes off again. What lies beyond m in `spectrum` and `columns` is zero and stays so.
    """

    def __init__(self, points: int, reach: int) -> None:
        m = 2 * reach + 1
        spectrum, columns, wave, rows = (
            pyfftw.zeros_aligned((points, points), "complex64") for _ in range(4)
        )
        # Rows are multiplied whole, zeros included: contiguous memory is quicker than less of it.
        self._spectrum, self._wave, self._arriving = spectrum[:m], wave, wave[:m]

        def plan(source: np.ndarray, target: np.ndarray, axis: int, direction: str) -> Any:
            flags = ("FFTW_ESTIMATE",)  # by rule, not by stopwatch: the same bits in every run
            return pyfftw.FFTW(source, target, (axis,), f"FFTW_{direction}", flags, threads=1)

        self._to_grid = (
            plan(spectrum[:, :m], columns[:, :m], 0, "BACKWARD"),
            plan(columns, wave, 1, "BACKWARD"),
        )
        self._to_spectrum = (
            plan(wave, rows, 1, "FORWARD"),
            plan(rows[:, :m], wave[:, :m], 0, "FORWARD"),
        )

    def propagate(self, beam: Beam, entrance: np.ndarray) -> np.ndarray:
        """Exit spectra (waves, m, m) of entrance spectra (waves, m, m)."""
        m = entrance.shape[-1]
        propagator = np.zeros_like(self._spectrum)
        propagator[:, :m] = beam.propagator
        (columns_to_grid, rows_to_grid), (rows_back, columns_back) = (
            [plan.execute for plan in plans] for plans in (self._to_grid, self._to_spectrum)
        )
        exit_spectra = np.empty_like(entrance)
        for spectrum, result in zip(entrance, exit_spectra, strict=True):
            self._spectrum[:, :m] = spectrum
            for transmission in beam.transmission:
                columns_to_grid()
                rows_to_grid()
                np.multiply(self._wave, transmission, out=self._wave)
                rows_back()
                columns_back()
                np.multiply(self._arriving, propagator, out=self._spectrum)
            result[:] = self._spectrum[:, :m]
        return exit_spectra


def propagate_on_gpu(beam: Beam, entrance: Any) -> Any:
    """What Planned.propagate does, all waves at a time; for arrays of CuPy (or NumPy)."""
    xp = get_array_module(entrance)
    (count, m, _), points = entrance.shape, beam.transmission.shape[-1]
    wave, spectra = xp.zeros((count, points, points), xp.complex64), entrance
    for transmission in beam.transmission:
        wave[...] = 0
        wave[:, :m, :m] = spectra
        wave = xp.fft.fft2(xp.fft.ifft2(wave, norm="forward") * transmission)
        spectra = wave[:, :m, :m] * beam.propagator
    return spectra
