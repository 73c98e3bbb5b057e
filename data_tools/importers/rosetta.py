"""Formats that rosettasciio reads: .mib, .dm3 and .dm4, .hspy, .zspy, EMPAD's .xml, and others.

rosettasciio knows the bytes; which axes are the scan's is often ours to find out. Data stay on the
disk until rows are read; formats of which rosettasciio cannot leave them there are refused.
"""

import importlib
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from data_tools.importers.calibration import Known
from data_tools.importers.scan import (
    Axis,
    Given,
    Scan,
    from_array,
    from_frames,
    library,
    order_axes,
    steps,
)
from stemdl.errors import UserError


def plugins(path: Path) -> list[Mapping[str, Any]]:
    """rosettasciio's readers for files of this name; some names belong to several formats."""
    extension = path.suffix[1:].lower()
    return [
        each
        for each in library("rsciio", path).IO_PLUGINS
        if extension in [known.lower() for known in each["file_extensions"]]
    ]


def open_rosetta(path: Path, given: Given, stack: ExitStack) -> list[Scan]:
    """The scan of a file that rosettasciio reads.

    Raises:
        UserError: damaged, no scan in it, several and no --key, or the scan's shape is unknown.
    """
    extension = path.suffix[1:].lower()
    more: dict[str, Any] = {}
    if extension == "mib":
        more["navigation_shape"] = _mib_scan(path, given)
    elif extension == "zspy":
        more["mode"] = "r"  # it would open for writing
    signals = _signals(path, more)
    signal = _choose(path, signals, given)
    where = str(path) if len(signals) == 1 else f"{path}:{_title(signal)}"
    found = _optics(signal)
    data = signal["data"]
    if data.ndim == 3 and given.scan is not None:
        return [from_frames(data, where, given.scan, known=found)]
    axes = [
        Axis(str(axis.get("name") or ""), str(axis.get("units") or ""), float(axis["scale"]))
        for axis in signal["axes"]
    ]
    default = _dm_order(signal) if extension in ("dm3", "dm4") else _navigation(signal)
    order = order_axes(where, axes, given, default)
    return [from_array(data, where, order, known=found | steps(axes, order))]


def _signals(path: Path, more: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the first reader makes of the file that can read it."""
    failures = []
    for each in plugins(path):
        try:
            return importlib.import_module(each["api"]).file_reader(str(path), lazy=True, **more)
        except Exception as error:  # readers raise whatever they run into
            failures.append(f"{each['name']} ({type(error).__name__}: {error})")
    raise UserError(f"{path}: cannot be read as {' or '.join(failures)}")


def _choose(path: Path, signals: list[dict[str, Any]], given: Given) -> dict[str, Any]:
    wanted = 3 if given.scan and not any(each["data"].ndim == 4 for each in signals) else 4
    fitting = [each for each in signals if each["data"].ndim == wanted]
    if given.key is not None:
        fitting = [each for each in fitting if _title(each) == given.key]
    if len(fitting) == 1:
        return fitting[0]
    listed = ", ".join(f"{_title(each)} {each['data'].shape}" for each in fitting or signals)
    if fitting:
        raise UserError(f"{path}: has several scans; give --key, one of {listed}")
    raise UserError(
        f"{path}: has no 4D scan{' of that --key' if given.key else ''}; it has {listed} "
        "(a 3D one is a list of patterns and needs --scan)"
    )


def _mib_scan(path: Path, given: Given) -> tuple[int, int] | None:
    """rosettasciio's (x, y), or None to let it read the .hdr file's frames per trigger.

    Without them it would guess the scan's width from the clock, which we do not trust.
    """
    if given.scan is not None:
        _mib_complete(path, given.scan)
        return given.scan[1], given.scan[0]
    header = path.with_suffix(".hdr")
    if header.exists():
        for line in header.read_text(errors="replace").splitlines():
            name, _, value = line.partition("\t")
            if name.startswith("Frames per Trigger") and value.strip() not in ("", "0", "1"):
                return None
    raise UserError(
        f"{path}: does not say the shape of its scan (no frames per trigger in {header.name}); "
        "give --scan Y,X"
    )


def _mib_complete(path: Path, scan: tuple[int, int]) -> None:
    """Raise a UserError if the file has not as many patterns as the scan."""
    reader = library("rsciio.quantumdetector", path)
    try:
        frames = reader.load_mib_data(str(path), lazy=True).shape[0]
    except Exception as error:
        raise UserError(f"{path}: cannot be read as a .mib file ({error})") from error
    if frames != scan[0] * scan[1]:
        raise UserError(
            f"{path}: holds {frames} patterns, but --scan {scan[0]},{scan[1]} makes "
            f"{scan[0] * scan[1]}"
        )


def _dm_order(signal: Mapping[str, Any]) -> Known | None:
    """DigitalMicrograph marks scans that it stores pattern by pattern; files of before 2019 go
    the other way round and bear no mark (openNCEM #17, LiberTEM #499, #1401).
    """
    swapped = _tag(signal, "ImageTags", "Meta Data", "Data Order Swapped")
    if swapped is None:
        return None
    by_pattern = str(swapped).strip().lower() in ("1", "true")  # scripts write it as text
    order = ("y", "x", "ky", "kx") if by_pattern else ("ky", "kx", "y", "x")
    return Known(order, "file: Data Order Swapped")


def _navigation(signal: Mapping[str, Any]) -> Known | None:
    """HyperSpy's navigation axes are the scan's."""
    if [bool(axis.get("navigate")) for axis in signal["axes"]] != [True, True, False, False]:
        return None
    return Known(("y", "x", "ky", "kx"), "file: navigation axes")


def _optics(signal: Mapping[str, Any]) -> dict[str, Known]:
    """Energy and semi-angle, from HyperSpy's metadata or DigitalMicrograph's tags."""
    tem = signal.get("metadata", {}).get("Acquisition_instrument", {}).get("TEM", {})
    found = {}
    if tem.get("beam_energy"):
        found["energy"] = Known(float(tem["beam_energy"]), "file: beam_energy")
    elif voltage := _tag(signal, "ImageTags", "Microscope Info", "Voltage"):
        found["energy"] = Known(float(voltage) * 1e-3, "file: Microscope Info, Voltage")
    if tem.get("convergence_angle"):
        found["semi_angle"] = Known(float(tem["convergence_angle"]), "file: convergence_angle")
    return found


def _tag(signal: Mapping[str, Any], *path: str) -> Any:
    """A tag of a DigitalMicrograph image; None if there is none."""
    tags: Any = signal.get("original_metadata", {}).get("ImageList", {}).get("TagGroup0", {})
    for name in path:
        tags = tags.get(name) if isinstance(tags, Mapping) else None
    return tags


def _title(signal: Mapping[str, Any]) -> str:
    return str(signal.get("metadata", {}).get("General", {}).get("title", ""))
