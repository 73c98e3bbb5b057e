"""HDF5 of others: py4DSTEM and EMD, the data of OLCF 1510313, and plain arrays by key.

Formats as their programs write them: EMD 1.0 (emdfile 0.0.16, py4DSTEM 0.14) numbers its axes
dim0 ... dim3, EMD 0.x (Berkeley, Prismatic, py4DSTEM up to 0.12) dim1 ... dim4.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from data_tools.importers.calibration import Known, quantity
from data_tools.importers.scan import Axis, Given, Scan, from_array, from_frames, order_axes, steps
from stemdl.errors import UserError

PLAIN = Known(("y", "x", "ky", "kx"), "assumed; give --axes if it is not")


def open_hdf5(path: Path, given: Given, stack: ExitStack) -> list[Scan]:
    """The scans of an HDF5 file, which stays open until `stack` closes.

    Raises:
        UserError: damaged, no scan in it, or several arrays and no --key.
    """
    try:
        file = stack.enter_context(h5py.File(path, "r", locking=False))
    except OSError as error:
        raise UserError(f"{path}: cannot be read as HDF5 ({error})") from error
    if str(file.attrs.get("format", "")).startswith("stemdl.shard"):
        raise UserError(f"{path}: is a shard already; stemdl predict takes it as it is")
    patterns = list(_olcf(path, file))
    if patterns:
        return patterns
    arrays: dict[str, h5py.Dataset] = {}
    file.visititems(
        lambda name, item: arrays.update({name: item}) if isinstance(item, h5py.Dataset) else None
    )
    dataset = choose(path, arrays, given)
    where = f"{path}:{dataset.name}"
    if dataset.parent.attrs.get("emd_group_type") is not None and dataset.ndim == 4:
        return [_emd(where, dataset, given)]
    return plain(where, dataset, given)


def choose(path: Path, arrays: Mapping[str, Any], given: Given) -> Any:
    """The array of patterns among a file's arrays, by name.

    Raises:
        UserError: there is none or more than one, or --key names none.
    """
    if given.key is not None:
        key = given.key.strip("/")
        if key not in arrays:
            raise UserError(f"{path}: has no array {key!r}; it has {_listed(arrays)}")
        return arrays[key]
    wanted = (3,) if given.scan else (4, 5)
    fitting = {
        name: array
        for name, array in arrays.items()
        if array.ndim in wanted and array.dtype.kind in "iuf"
    }
    if not fitting:
        raise UserError(
            f"{path}: has no 4D array of numbers (a 3D one is a list of patterns and needs "
            f"--scan); it has {_listed(arrays)}"
        )
    if len(fitting) > 1:
        raise UserError(f"{path}: has several scans; give --key, one of {_listed(fitting)}")
    return next(iter(fitting.values()))


def plain(where: str, array: Any, given: Given) -> list[Scan]:
    """The scans of an array that nothing describes: a list of patterns, a scan, or scans.

    Raises:
        UserError: it has another number of dimensions.
    """
    if array.ndim == 3 and given.scan is not None:
        return [from_frames(array, where, given.scan)]
    order = Known(given.axes, "--axes") if given.axes else PLAIN
    if array.ndim == 4:
        return [from_array(array, where, order)]
    if array.ndim == 5:
        return [
            from_array(array, f"{where}[{index}]", order, at=(index,))
            for index in range(array.shape[0])
        ]
    raise UserError(
        f"{where}: is {array.shape}, wanted 4 dimensions, 5 (many scans), or 3 with --scan"
    )


def _listed(arrays: Mapping[str, Any], most: int = 6) -> str:
    shown = [f"{name} {tuple(array.shape)}" for name, array in list(arrays.items())[:most]]
    more = len(arrays) - len(shown)
    return (", ".join(shown) or "none") + (f" and {more} more" if more else "")


def _emd(where: str, dataset: h5py.Dataset, given: Given) -> Scan:
    group = dataset.parent
    first = 0 if "dim0" in group else 1
    axes = [_dimension(group.get(f"dim{first + index}")) for index in range(4)]
    order = order_axes(where, axes, given, default=PLAIN)
    calibration = _py4dstem(dataset)
    if calibration.get("QR_flip") and given.axes is None:
        order = Known((*order.value[:2], *order.value[:1:-1]), "file: QR_flip exchanges ky and kx")
    found = steps(axes, order) | _calibrated(calibration, order)
    return from_array(dataset, where, order, known=found)


def _dimension(dim: h5py.Dataset | None) -> Axis:
    """EMD keeps an axis as its coordinates, or as the first two of them."""
    if dim is None or dim.dtype.kind not in "iuf":
        return Axis()
    step = float(dim[1] - dim[0]) if dim.shape[0] > 1 else 0.0
    name, unit = (_text(dim.attrs.get(key, "")) for key in ("name", "units"))
    return Axis(name, unit, step)


def _py4dstem(dataset: h5py.Dataset) -> dict[str, Any]:
    """py4DSTEM's calibration, which lies beside the data in the root of its tree."""
    root = dataset.file[dataset.name.split("/")[1]]
    group = root.get("metadatabundle/calibration") if isinstance(root, h5py.Group) else None
    if group is None:
        return {}
    values = {key: item[()] for key, item in group.items() if isinstance(item, h5py.Dataset)}
    return {key: value for key, value in values.items() if _text(value) != "_None"}


def _calibrated(values: Mapping[str, Any], order: Known) -> dict[str, Known]:
    """py4DSTEM's values, whose x is the slower of two axes, by our names."""
    found = {}
    for key, name in (("scan_step", "R"), ("detector_step", "Q")):
        size = values.get(f"{name}_pixel_size", 0)
        step = quantity((float(size), float(size)), _text(values.get(f"{name}_pixel_units", "")))
        if step is not None:
            found[key] = Known(step, f"file: {name}_pixel_size")
    if "QR_rotation_degrees" in values:
        found["rotation"] = Known(float(values["QR_rotation_degrees"]), "file: QR_rotation_degrees")
    if "qx0_mean" in values and "qy0_mean" in values:
        stored = dict(zip(order.value[2:], (values["qx0_mean"], values["qy0_mean"]), strict=True))
        found["origin"] = Known(
            (float(stored["ky"]), float(stored["kx"])), "file: qx0_mean, qy0_mean"
        )
    return found


def _olcf(path: Path, file: h5py.File) -> Iterator[Scan]:
    """Data of OLCF 10.13139/OLCF/1510313: in each group the patterns of one crystal along three
    zone axes. Each pattern is a scan of one probe position.
    """
    for name, group in file.items():
        if not isinstance(group, h5py.Group) or "cbed_stack" not in group:
            continue
        stack, attributes = group["cbed_stack"], group.attrs
        for zone in range(stack.shape[0]):
            yield Scan(
                f"{path}:{name}/cbed_stack[{zone}]",
                (1, 1, *stack.shape[1:]),
                stack.dtype,
                partial(_one_pattern, stack, zone),
                known=_olcf_optics(attributes, zone),
                sample={
                    "material": _text(attributes.get("material", name)),
                    "prototype": name,
                    "formula": _text(attributes.get("formula", "")),
                    "space_group": _text(attributes.get("space_group", "")),
                    "zone_axis": _olcf_zone(attributes, zone),
                },
            )


def _one_pattern(stack: h5py.Dataset, zone: int, start: int, stop: int) -> NDArray:
    return stack[zone][None, None][start:stop]


def _olcf_optics(attributes: Mapping[str, Any], zone: int) -> dict[str, Known]:
    found = {"rotation": Known(0.0, "simulated")}
    if "energy_keV" in attributes:
        found["energy"] = Known(float(np.ravel(attributes["energy_keV"])[0]), "file: energy_keV")
    if "semi_angles_rad" in attributes:
        angle = float(np.ravel(attributes["semi_angles_rad"])[zone]) * 1e3
        found["semi_angle"] = Known(angle, "file: semi_angles_rad")
    return found


def _olcf_zone(attributes: Mapping[str, Any], zone: int) -> tuple[int, ...]:
    directions = np.reshape(attributes.get("z_dirs", np.zeros((zone + 1, 3))), (-1, 3))
    return tuple(int(index) for index in np.rint(directions[zone]))


def _text(value: Any) -> str:
    """Text of HDF5 attributes and scalars, which may be bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
