"""One scan made ready: calibrated, its fields planned, its intensities scaled."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Literal

import numpy as np

from data_tools.importers import resample
from data_tools.importers.calibration import Calibration, disagreement, settle
from data_tools.importers.fields import Cut, Wanted, plan, survey
from data_tools.importers.scan import Scan
from stemdl import files
from stemdl.data import shards
from stemdl.data.trained_on import TrainedOn
from stemdl.errors import UserError

SAMPLE_BYTES = 2 << 30  # of patterns in one sample, at most


@dataclass(frozen=True)
class Wish:
    """What the user wants of an import."""

    match: Path | None = None  # a trained run whose network shall take the fields
    wanted: Wanted = field(default_factory=Wanted)  # without it; its overlap also with it
    split: str = "test"
    name: str | None = None  # of the shards; None: the file's
    material: str | None = None  # None: what the file says, or its name
    dtype: Literal["float32", "float16"] = "float32"


@dataclass(frozen=True)
class Prepared:
    """A scan, ready to be cut."""

    scan: Scan
    calibration: Calibration
    cut: Cut
    scale: float  # what intensities are multiplied with
    axes: shards.Axes
    unit: str  # of intensities, times `scale`
    warnings: tuple[str, ...]


def prepare(scan: Scan, wish: Wish, kind: TrainedOn | None) -> Prepared:
    """Calibrate a scan and plan its fields; reads the mean pattern where it is needed.

    Raises:
        UserError: the calibration is incomplete, or the fields cannot be had from this scan.
    """
    needed = kind is not None or not {"origin", "detector_step"} <= set(scan.known)
    mean, count = survey(scan) if needed else (np.zeros(scan.shape[2:]), 0)
    disc = resample.bright_field(mean)
    calibration = settle(scan.where, scan.shape[:2], scan.known, disc)
    if "origin" not in scan.known:
        source = f"measured: bright-field disc of the mean of {count} patterns"
        calibration = replace(calibration, origin=replace(calibration.origin, source=source))
    warnings = [disagreement(calibration, disc)]
    if kind is None:
        cut = plan(scan, calibration, wish.wanted)
        beam = calibration.beam
        scale = 1.0 if beam is None else 1 / beam.value
        unit = "as in the file" if beam is None else "fraction of the beam"
        axes = _own_axes(scan, calibration, cut)
    else:
        cut = plan(scan, calibration, _match(kind, wish.wanted.overlap))
        seen = cut.operator @ resample.quarter_turns(mean, cut.turns).ravel()
        if not seen.sum() > 0:
            raise UserError(f"{scan.where}: the mean pattern sums to {seen.sum():g}: no electrons")
        scale, unit, axes = kind.intensity / float(seen.sum()), kind.cbed_unit, kind.axes
        warnings += _unlike(calibration, kind)
    if scan.potential is not None:
        axes = _with_potential(scan, cut, axes)
    size = prod(cut.field) * prod(cut.detector.shape) * np.dtype(wish.dtype).itemsize
    if size > SAMPLE_BYTES:
        raise UserError(
            f"{scan.where}: a field of all {cut.field[0]} x {cut.field[1]} probes has "
            f"{files.human_bytes(size)}; cut it with --field, such as 64,64"
        )
    return Prepared(scan, calibration, cut, scale, axes, unit, tuple(filter(None, warnings)))


def _match(kind: TrainedOn, overlap: int) -> Wanted:
    return Wanted(
        field=kind.cbed_shape[:2],
        scan_step=kind.axes.scan_step,
        detector=kind.cbed_shape[2:],
        detector_step=kind.axes.detector_step,
        overlap=overlap,
    )


def _own_axes(scan: Scan, calibration: Calibration, cut: Cut) -> shards.Axes:
    """The axes of fields that keep the scan's own step; 0 stands for what there is not."""
    step = 0.0
    if calibration.scan_step is not None:
        y, x = calibration.scan_step.value.value
        step = (y + x) / 2
        if abs(y - x) > resample.SAME * step:
            raise UserError(
                f"{scan.where}: the scan steps are {y:.4g} x {x:.4g} Å, wanted equal ones; give "
                "--match, which resamples them"
            )
    return shards.Axes(step, cut.detector.step[0], potential_pixel=0.0, potential_blur=0.0)


def _with_potential(scan: Scan, cut: Cut, axes: shards.Axes) -> shards.Axes:
    if not is_whole(scan, cut):
        return axes
    assert scan.potential is not None
    height, width = scan.potential().shape
    pixel = scan.shape[0] * axes.scan_step / height
    if abs(scan.shape[1] * axes.scan_step / width - pixel) > resample.SAME * pixel:
        raise UserError(
            f"{scan.where}: its potential {height} x {width} does not cover its scan "
            f"{scan.shape[0]} x {scan.shape[1]} with square pixels"
        )
    return replace(axes, potential_pixel=pixel, potential_blur=0.0)


def is_whole(scan: Scan, cut: Cut) -> bool:
    """Whether a field is the whole scan, so that the scan's potential is the field's."""
    return cut.field == scan.shape[:2] and cut.ratio == (1.0, 1.0)


def _unlike(calibration: Calibration, kind: TrainedOn) -> Iterator[str]:
    """Warnings where the microscope was set as none was in training."""
    for name, unit in (("energy", "keV"), ("semi_angle", "mrad")):
        known, trained = getattr(calibration, name), getattr(kind, name)
        if known is None or trained is None:
            continue
        low, high = trained
        if not low * 0.95 <= known.value <= high * 1.05:
            yield (
                f"{name} is {known.value:g} {unit}, the network was trained on {low:g} to "
                f"{high:g}: what it makes of these patterns is a guess"
            )
