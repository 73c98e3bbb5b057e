"""Zarr folders: abTEM's simulations, and plain arrays by key.

abTEM (1.0.11) writes `array0`, `array1`, ... and describes each in the attribute `metadata0`, ...;
up to 1.0.9 in `kwargs0`, ...
"""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from data_tools.importers.calibration import Known
from data_tools.importers.hdf5 import choose, plain
from data_tools.importers.scan import Axis, Given, Scan, from_array, library, order_axes, steps
from stemdl.errors import UserError

CARTESIAN = ("x", "y", "kx", "ky")  # in the order of abTEM's arrays: x is the slower


def open_zarr(path: Path, given: Given, stack: ExitStack) -> list[Scan]:
    """The scans of a zarr store.

    Raises:
        UserError: no zarr, no scan in it, or several and no --key.
    """
    zarr = library("zarr", path)
    try:
        root = zarr.open(path, mode="r")
    except Exception as error:  # zarr's errors have no common class
        raise UserError(f"{path}: cannot be read as zarr ({error})") from error
    if isinstance(root, zarr.Array):
        return plain(str(path), root, given)
    arrays = {
        name: item for name, item in root.members(max_depth=None) if isinstance(item, zarr.Array)
    }
    array = choose(path, arrays, given)
    number = array.path.removeprefix("array")
    metadata = _abtem(root.attrs, number)
    if metadata is None or array.ndim != 4:
        return plain(f"{path}:{array.path}", array, given)
    return [_simulated(f"{path}:{array.path}", array, metadata, given)]


def _abtem(attributes: Mapping[str, Any], number: str) -> dict[str, Any] | None:
    """abTEM's metadata of an array, in the form of abTEM 1.0.11."""
    if f"metadata{number}" in attributes:
        return dict(attributes[f"metadata{number}"])
    if f"kwargs{number}" not in attributes:
        return None
    old = attributes[f"kwargs{number}"]
    sampling = old["sampling"]
    sampling = sampling["_value"] if isinstance(sampling, Mapping) else sampling
    detector = [
        {"label": label, "units": "1/Å", "sampling": step}
        for label, step in zip(("kx", "ky"), sampling, strict=True)
    ]
    axes = [*old["ensemble_axes_metadata"], *detector]
    return {
        **old["metadata"],
        "axes": {f"axis_{index}": axis for index, axis in enumerate(axes)},
        "kwargs": {"fftshift": old.get("fftshift", True)},
    }


def _simulated(where: str, array: Any, metadata: dict[str, Any], given: Given) -> Scan:
    described = [metadata["axes"][f"axis_{index}"] for index in range(4)]
    axes = [
        Axis(axis["label"], axis.get("units"), float(axis.get("sampling", 0))) for axis in described
    ]
    labels = tuple(axis.name for axis in axes)
    if given.axes is None and sorted(labels) == sorted(CARTESIAN):
        order = Known(labels, "file: labels")
    else:
        order = order_axes(where, axes, given)
    if not metadata["kwargs"]["fftshift"]:
        raise UserError(
            f"{where}: its patterns have the zero frequency in the corner; write it again with "
            "fftshift=True"
        )
    found = steps(axes, order)
    found["beam"] = Known(1.0, "abTEM's whole beam")
    found["rotation"] = Known(0.0, "simulated")
    if "energy" in metadata:
        found["energy"] = Known(metadata["energy"] * 1e-3, "file: energy")
    if "semiangle_cutoff" in metadata:
        found["semi_angle"] = Known(float(metadata["semiangle_cutoff"]), "file: semiangle_cutoff")
    ky, kx = (array.shape[order.value.index(name)] for name in ("ky", "kx"))
    found["origin"] = Known((float(ky // 2), float(kx // 2)), "file: zero frequency")
    return from_array(array, where, order, known=found)
