"""Fields cut out of a scan: a network's number of probes on its step and its detector, streamed.

A scan is read by rows, no more than READ_BYTES at once; each pattern is brought onto the wanted
detector before the next rows come, so memory holds one band of reduced patterns, not the scan.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from data_tools.importers import resample
from data_tools.importers.calibration import Calibration, Pair
from data_tools.importers.resample import Detector
from data_tools.importers.scan import Scan
from stemdl.errors import UserError

READ_BYTES = 256 << 20  # of patterns, read at once
CACHE_BYTES = 4 << 20  # of patterns, resampled at once: more would not stay in a core's cache
SURVEY_BYTES = 1 << 30  # of patterns, read for the mean pattern


@dataclass(frozen=True)
class Wanted:
    """What the fields shall be; None: as in the scan."""

    field: tuple[int, ...] | None = None  # probes (y, x)
    scan_step: float | None = None  # [Å]
    detector: tuple[int, ...] | None = None  # pixels (ky, kx)
    detector_step: float | None = None  # [1/Å], with a detector
    binning: int = 1  # pixels of the scan to one, without a detector_step
    overlap: int = 0  # probes that neighbouring fields share


@dataclass(frozen=True)
class Cut:
    """How the fields of one scan are made."""

    turns: int  # quarter turns of the detector into the scan
    operator: sparse.csr_array  # (pixels of a field, pixels of the turned detector)
    detector: Detector  # of a field
    field: tuple[int, ...]  # probes
    ratio: Pair  # its scan step (y, x) in steps of the scan
    starts: tuple[list[int], list[int]]  # probes (y, x) of the scan at which fields begin

    @property
    def count(self) -> int:
        """Number of fields."""
        return len(self.starts[0]) * len(self.starts[1])


def survey(scan: Scan) -> tuple[NDArray[np.float64], int]:
    """The mean pattern (Ky, Kx) of a scan, and the number of patterns that it is of.

    Large scans are sampled: rows spread evenly, SURVEY_BYTES in all.
    """
    height, width, *detector = scan.shape
    row_bytes = width * prod(detector) * scan.dtype.itemsize
    some = max(1, min(height, SURVEY_BYTES // row_bytes))
    rows = np.unique(np.linspace(0, height - 1, some).astype(int))
    total = np.zeros(detector)
    for row in rows:
        total += scan.rows(row, row + 1).sum((0, 1), dtype=np.float64)
    return total / (len(rows) * width), len(rows) * width


def plan(scan: Scan, calibration: Calibration, wanted: Wanted) -> Cut:
    """How to cut `wanted` out of a scan.

    Raises:
        UserError: it would be extrapolation; says by how much.
    """
    try:
        return _plan(scan, calibration, wanted)
    except UserError as error:
        raise UserError(f"{scan.where}: {error}") from error


def fields(scan: Scan, cut: Cut) -> Iterator[tuple[tuple[int, int], NDArray[np.float32]]]:
    """Each field's first probe (y, x) in the scan, and its patterns (Fy, Fx, Ky, Kx) float32.

    The patterns sum to what those of the scan do, inside of the wanted detector.
    """
    height, width = (
        resample.extent(count, ratio) for count, ratio in zip(cut.field, cut.ratio, strict=True)
    )
    for y in cut.starts[0]:
        band = _reduced(scan, cut, y, y + height)
        band = resample.interpolated(band, np.arange(cut.field[0]) * cut.ratio[0], axis=0)
        for x in cut.starts[1]:
            at = np.arange(cut.field[1]) * cut.ratio[1]
            yield (y, x), resample.interpolated(band[:, x : x + width], at, axis=1)


def _plan(scan: Scan, calibration: Calibration, wanted: Wanted) -> Cut:
    turns = round(calibration.rotation.value / 90)
    angle = calibration.rotation.value - turns * 90
    source = resample.turned(
        Detector(scan.shape[2:], calibration.detector_step.value.value, calibration.origin.value),
        turns,
    )
    if wanted.detector is not None and wanted.detector_step is not None:
        target = resample.centred(wanted.detector, wanted.detector_step)
    else:
        source, target = _whole_pixels(source, wanted)
    ratio = (1.0, 1.0)
    if wanted.scan_step is not None and calibration.scan_step is not None:
        y, x = calibration.scan_step.value.value
        ratio = (
            resample.step_ratio(y, wanted.scan_step),
            resample.step_ratio(x, wanted.scan_step),
        )
    field = wanted.field or scan.shape[:2]
    return Cut(
        turns=turns,
        operator=resample.detector_operator(source, target, angle).astype(np.float32),
        detector=target,
        field=field,
        ratio=ratio,
        starts=(
            resample.starts(scan.shape[0], field[0], ratio[0], wanted.overlap),
            resample.starts(scan.shape[1], field[1], ratio[1], wanted.overlap),
        ),
    )


def _whole_pixels(source: Detector, wanted: Wanted) -> tuple[Detector, Detector]:
    """The source and a target of its own pixels, binned, none of them divided.

    For that the optic axis moves by half a pixel at most.
    """
    step = sum(source.step) / 2
    if abs(source.step[0] - source.step[1]) > resample.SAME * step:
        raise UserError(
            f"detector pixels are {source.step[0]:.4g} x {source.step[1]:.4g} 1/Å, wanted square "
            "ones; give --match, which resamples them"
        )
    shape = wanted.detector or tuple(
        _most_pixels(count, origin) // wanted.binning
        for count, origin in zip(source.shape, source.origin, strict=True)
    )
    if 0 in shape:
        raise UserError(f"--bin {wanted.binning} is more than the detector has pixels")
    half = [(pixels * wanted.binning - 1) / 2 for pixels in shape]
    y, x = (round(at - h) + h for at, h in zip(source.origin, half, strict=True))
    target = resample.centred((shape[0], shape[1]), step * wanted.binning)
    return replace(source, step=(step, step), origin=(y, x)), target


def _most_pixels(count: int, origin: float) -> int:
    """Pixels of the largest detector that is centred on the origin, to half a pixel."""
    if abs(origin - (count - 1) / 2) <= 0.5:
        return count
    return max(1, int(2 * min(origin + 0.5, count - 0.5 - origin) + 1e-6))


def _reduced(scan: Scan, cut: Cut, start: int, stop: int) -> NDArray[np.float32]:
    """Probe rows of a scan on the wanted detector: (stop - start, Sx, Ky, Kx) float32."""
    width, pixels = scan.shape[1], prod(scan.shape[2:])
    out = np.empty((stop - start, width, *cut.detector.shape), np.float32)
    step = max(1, READ_BYTES // (width * pixels * scan.dtype.itemsize))
    for low in range(start, stop, step):
        high = min(low + step, stop)
        block = resample.quarter_turns(scan.rows(low, high), cut.turns).reshape(-1, pixels)
        reduced = out[low - start : high - start].reshape(len(block), -1)
        some = max(1, CACHE_BYTES // (pixels * 4))
        for first in range(0, len(block), some):
            patterns = block[first : first + some].astype(np.float32)
            reduced[first : first + some] = (cut.operator @ patterns.T).T
    return out
