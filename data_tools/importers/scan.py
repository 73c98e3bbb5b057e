"""A 4D-STEM scan in somebody's file, unread: what readers make and everything else takes.

Axes are called y, x (probe positions) and ky, kx (detector pixels). Readers say in which order the
file has them; from here on they go (y, x, ky, kx). Patterns come by rows of the scan, so that a
file of any size streams.
"""

import importlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_tools.importers.calibration import Known, Pair, quantity
from stemdl.errors import UserError

NAMES = ("y", "x", "ky", "kx")


@dataclass(frozen=True)
class Given:
    """What the user says of a file."""

    key: str | None = None  # path of the array in the file
    axes: tuple[str, ...] | None = None  # the order of NAMES in the file, slowest first
    flip: tuple[str, ...] = ()  # those of NAMES that run backwards
    scan: tuple[int, int] | None = None  # (Sy, Sx), where the file holds a mere list of patterns
    fill_nan: float | None = None  # stands for NaN and infinity
    calibration: Mapping[str, Known] = field(default_factory=dict)  # see calibration.settle


@dataclass(frozen=True)
class Scan:
    """One scan. `rows(start, stop)` reads probe rows: (stop - start, Sx, Ky, Kx)."""

    where: str  # the file, and the place in it
    shape: tuple[int, ...]  # (Sy, Sx, Ky, Kx)
    dtype: np.dtype
    rows: Callable[[int, int], NDArray]
    known: Mapping[str, Known] = field(default_factory=dict)  # calibration, see settle
    axes: Known | None = None  # order of the axes in the file
    sample: Mapping[str, Any] = field(default_factory=dict)  # fields of shards.SAMPLE
    potential: Callable[[], NDArray] | None = None  # (H, W) [V], over the scanned field


@dataclass(frozen=True)
class Axis:
    """What a file says of one axis of its array."""

    name: str = ""
    unit: str | None = None
    step: float = 0.0


def from_array(
    array: Any, where: str, order: Known, *, at: tuple[int, ...] = (), **more: Any
) -> Scan:
    """A scan that is the 4D array `array[at]`, whose axes go in `order`.

    Args:
        array: anything with shape and dtype that slices into something NumPy takes.
        more: other fields of Scan.
    """
    names, shape = order.value, array.shape[len(at) :]
    scan_row = names.index("y")
    standard = [names.index(name) for name in NAMES]

    def rows(start: int, stop: int) -> NDArray:
        index = [slice(None)] * 4
        index[scan_row] = slice(start, stop)
        return np.asarray(array[(*at, *index)]).transpose(standard)

    ordered = tuple(int(shape[axis]) for axis in standard)
    return Scan(where, ordered, np.dtype(array.dtype), rows, axes=order, **more)


def from_frames(array: Any, where: str, scan: tuple[int, int], **more: Any) -> Scan:
    """A scan that is a list of patterns (Sy * Sx, Ky, Kx), x fastest.

    Raises:
        UserError: the list has another number of patterns.
    """
    count, *detector = array.shape
    if count != math.prod(scan):
        raise UserError(
            f"{where}: holds {count} patterns, but --scan {scan[0]},{scan[1]} makes "
            f"{math.prod(scan)}"
        )

    def rows(start: int, stop: int) -> NDArray:
        patterns = np.asarray(array[start * scan[1] : stop * scan[1]])
        return patterns.reshape(stop - start, scan[1], *detector)

    return Scan(where, (*scan, *detector), np.dtype(array.dtype), rows, **more)


def order_axes(
    where: str, axes: Sequence[Axis], given: Given, default: Known | None = None
) -> Known:
    """The order of y, x, ky, kx in a file: said by the user, its units, its names, or the reader.

    Units and names tell scan from detector; of either two axes, the slower one is y or ky.

    Raises:
        UserError: nobody says it.
    """
    if given.axes is not None:
        return Known(given.axes, "--axes")
    for source, kinds in (
        ("file: units", [_kind_of_unit(axis) for axis in axes]),
        ("file: names", [_kind_of_name(axis.name) for axis in axes]),
    ):
        if sorted(kinds) == ["detector", "detector", "scan", "scan"]:
            left = {"scan": ["y", "x"], "detector": ["ky", "kx"]}
            return Known(tuple(left[kind].pop(0) for kind in kinds), source)
    if default is None:
        raise UserError(
            f"{where}: does not say which axes are the scan's and which the detector's; give "
            "--axes, such as y,x,ky,kx (slowest first) or ky,kx,y,x"
        )
    return default


def steps(axes: Sequence[Axis], order: Known) -> dict[str, Known]:
    """scan_step and detector_step, where the file's axes have them."""
    named = dict(zip(order.value, axes, strict=True))
    found = {}
    for key, (slow, fast), units in (
        ("scan_step", ("y", "x"), ("Å",)),
        ("detector_step", ("ky", "kx"), ("1/Å", "mrad")),
    ):
        pair = (named[slow].step, named[fast].step)
        step = quantity(pair, named[slow].unit)
        if step is not None and step.unit in units and named[slow].unit == named[fast].unit:
            found[key] = Known(step, "file")
    return found


def library(name: str, path: Path) -> Any:
    """An optional library that reading `path` needs.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"{path}: reading it needs {error.name}, which is not installed; "
            "pip install 'stemdl[formats]'"
        ) from error


def arranged(scan: Scan, given: Given) -> Scan:
    """The scan as the user says that it is: flipped, calibrated, NaN filled, damage reported.

    What the user says of the calibration overrides the file. From here on the optic axis is a pixel
    of the flipped patterns.

    Raises:
        UserError: from `rows`: the file ends early, or holds NaN that `given` does not fill.
    """
    flipped = tuple(NAMES.index(name) for name in given.flip)
    count = scan.shape[0]

    def rows(start: int, stop: int) -> NDArray:
        if "y" in given.flip:
            start, stop = count - stop, count - start
        try:
            block = scan.rows(start, stop)
        except (OSError, EOFError) as error:
            raise UserError(
                f"{scan.where}: probe rows {start} to {stop - 1} cannot be read ({error})"
            ) from error
        return np.flip(_finite(block, scan.where, start, given.fill_nan), flipped)

    def flip_potential() -> NDArray:
        assert scan.potential is not None
        return np.flip(scan.potential(), [axis for axis in flipped if axis < 2])

    known = {**scan.known, **given.calibration}
    if "origin" in known:
        origin = known["origin"]
        known["origin"] = Known(
            _flip_pixel(origin.value, scan.shape[2:], given.flip), origin.source
        )
    return replace(
        scan, rows=rows, known=known, potential=flip_potential if scan.potential else None
    )


def _finite(block: NDArray, where: str, start: int, fill: float | None) -> NDArray:
    if block.dtype.kind != "f" or np.isfinite(block).all():
        return block
    if fill is None:
        y, x, ky, kx = np.argwhere(~np.isfinite(block))[0]
        raise UserError(
            f"{where}: the pattern at probe ({start + y}, {x}) holds NaN or infinity at detector "
            f"pixel ({ky}, {kx}); give --fill-nan, such as 0"
        )
    return np.nan_to_num(block, nan=fill, posinf=fill, neginf=fill)


def _flip_pixel(pixel: Pair, shape: Sequence[int], flip: Sequence[str]) -> Pair:
    ky, kx = (
        count - 1 - at if name in flip else at
        for at, count, name in zip(pixel, shape, ("ky", "kx"), strict=True)
    )
    return ky, kx


def _kind_of_unit(axis: Axis) -> str:
    step = quantity((1.0, 1.0), axis.unit)
    return "" if step is None else "scan" if step.unit == "Å" else "detector"


def _kind_of_name(name: str) -> str:
    if re.match(r"(scan|probe|position|r|x|y)($|[^a-z]|x$|y$)", name.lower()):
        return "scan"
    if re.match(r"(detector|diffraction|q|k)($|[^a-z]|x$|y$)", name.lower()):
        return "detector"
    return ""
