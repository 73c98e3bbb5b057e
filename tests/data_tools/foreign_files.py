"""Small files in other people's formats, written by other means than the importers read them.

All hold `scan()`: 3 x 5 probes, 7 x 11 detector pixels, every value of its own.
"""

import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SHAPE = (3, 5, 7, 11)  # y, x, ky, kx
NAMES = ("y", "x", "ky", "kx")


def scan(dtype: str = "uint16") -> NDArray:
    """(y, x, ky, kx): the value at each place is its number."""
    return np.arange(np.prod(SHAPE), dtype=dtype).reshape(SHAPE)


def stored(order: tuple[str, ...], dtype: str = "uint16") -> NDArray:
    """The scan with its axes in another order."""
    return np.ascontiguousarray(scan(dtype).transpose([NAMES.index(name) for name in order]))


# DigitalMicrograph 3 and 4: a tree of tags. Lengths and codes are big-endian, values little-endian;
# version 4 has 64-bit lengths and the size of each tag.


def write_dm(
    path: Path,
    array: NDArray,
    units: tuple[str, ...] = ("", "", "", ""),
    scales: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0),
    tags: dict[str, Any] | None = None,
    version: int = 4,
) -> None:
    """Write an array as the one image of a file. `units` and `scales` are those of its axes."""
    axes = list(zip(array.shape, units, scales, strict=True))[::-1]  # DM names the fastest first
    calibrations = {
        "Brightness": {"Origin": 0.0, "Scale": 1.0, "Units": ""},
        "Dimension": [{"Origin": 0.0, "Scale": scale, "Units": unit} for _, unit, scale in axes],
    }
    codes = {"uint16": 10, "float32": 2, "int32": 7}
    image = {
        "ImageData": {
            "Calibrations": calibrations,
            "Data": array,
            "DataType": codes[array.dtype.name],
            "Dimensions": [size for size, _, _ in axes],
            "PixelDepth": array.itemsize,
        },
        "ImageTags": tags or {},
        "Name": "scan",
    }
    body = _group({"ImageList": [image]}, version, root=True)
    size = "q" if version == 4 else "i"
    path.write_bytes(struct.pack(f">i{size}i", version, len(body), 1) + body + bytes(8))


def _group(content: Any, version: int, *, root: bool = False) -> bytes:
    items = [("", each) for each in content] if isinstance(content, list) else content.items()
    tags = [_entry(name, value, version) for name, value in items]
    long = "q" if version == 4 else "i"
    inner = b"".join(tags)
    size = struct.pack(">q", len(inner)) if version == 4 and not root else b""
    return struct.pack(">bb", 0, 0) + size + struct.pack(f">{long}", len(tags)) + inner


def _entry(name: str, value: Any, version: int) -> bytes:
    group = isinstance(value, dict | list)
    head = struct.pack(">bh", 20 if group else 21, len(name)) + name.encode()
    if group:
        body = _group(value, version)
        return head + body
    body = _value(value, version)
    size = struct.pack(">q", len(body)) if version == 4 else b""
    return head + size + body


def _value(value: Any, version: int) -> bytes:
    long = "q" if version == 4 else "i"

    def described(*numbers: int) -> bytes:
        return b"%%%%" + struct.pack(f">{long * (len(numbers) + 1)}", len(numbers), *numbers)

    if isinstance(value, np.ndarray):
        element = {"uint16": 4, "float32": 6, "int32": 3}[value.dtype.name]
        return described(20, element, value.size) + value.astype(value.dtype, "C").tobytes()
    if isinstance(value, str):
        return described(20, 4, len(value)) + value.encode("utf-16-le")
    if isinstance(value, bool):
        return described(8) + struct.pack("<b", value)
    if isinstance(value, int):
        return described(5) + struct.pack("<I", value)
    return described(6) + struct.pack("<f", value)


def write_mib(path: Path, frames: NDArray, per_trigger: int | None = None) -> None:
    """Write frames (N, Ky, Kx) as a Merlin detector does: a text header before each, rows from
    the bottom up, big-endian. `per_trigger` goes to the .hdr file beside it.
    """
    count, height, width = frames.shape
    content = b""
    for number, frame in enumerate(frames):
        fields = [
            "MQ1", f"{number + 1:06d}", "00384", "01", f"{width:04d}", f"{height:04d}", "U16",
            "   1x1", "01", f"2024-01-01 10:00:00.{number:06d}", "0.001", "0", "0", "1.2E+2",
            f"2024-01-01T10:00:00.{number:09d}Z", "1000000ns", "12", "",
        ]  # fmt: skip
        content += ",".join(fields).encode().ljust(384, b"\x00")
        content += frame[::-1].astype(">u2").tobytes()
    path.write_bytes(content)
    if per_trigger is not None:
        path.with_suffix(".hdr").write_text(
            "HDR,\n"
            f"Frames in Acquisition (Number):\t{count}\n"
            f"Frames per Trigger (Number):\t{per_trigger}\n"
            "End\t\n"
        )
