"""EMPAD's .raw: 130 rows of 128 float32 a pattern, the last two of which are no pixels."""

import math
import re
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from data_tools.importers.scan import Given, Scan, from_frames
from stemdl.errors import UserError

STORED, PIXELS = (130, 128), (128, 128)


def open_empad(path: Path, given: Given, stack: ExitStack) -> list[Scan]:
    """The scan of an EMPAD file. Its shape is the user's, the name's (scan_x256_y128.raw), or
    square.

    Raises:
        UserError: the size is no whole number of patterns, or the shape of the scan is unknown.
    """
    size, pattern = path.stat().st_size, math.prod(STORED) * 4
    if size == 0 or size % pattern:
        raise UserError(
            f"{path}: has {size} bytes, wanted a multiple of {pattern} (EMPAD's 130 x 128 "
            "float32); it is truncated or of another camera"
        )
    count = size // pattern
    scan = given.scan or _named(path.stem) or (math.isqrt(count), math.isqrt(count))
    if math.prod(scan) != count and given.scan is None:
        raise UserError(
            f"{path}: holds {count} patterns, which are no scan of {scan[0]} x {scan[1]}; "
            "give --scan Y,X"
        )
    frames = np.memmap(path, "<f4", "r", shape=(count, *STORED))[:, : PIXELS[0]]
    return [from_frames(frames, str(path), scan)]


def _named(stem: str) -> tuple[int, int] | None:
    match = re.search(r"x(\d+)_y(\d+)$", stem)
    return (int(match[2]), int(match[1])) if match else None
