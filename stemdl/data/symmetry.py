"""The symmetries of the square, applied to a whole scan.

When a specimen is mirrored or turned by a quarter, its potential is, the probe positions are, and
each diffraction pattern is too. So an operation acts on the scan axes, the detector axes and the
potential alike, about their geometrical centres. This holds for round probes (defocus and Cs, no
astigmatism), and lets one simulated sample stand for eight.
"""

from collections.abc import Sequence

import numpy as np


def order(*shapes: Sequence[int]) -> int:
    """Number of operations that keep arrays of these shapes, axes paired (y, x), (y, x) ...

    Eight if all pairs are square, else the four that need no exchange of axes: flips and half turn.
    """
    pairs = [shape[axis : axis + 2] for shape in shapes for axis in range(0, len(shape), 2)]
    return 8 if all(y == x for y, x in pairs) else 4


def apply(operation: int, array: np.ndarray) -> np.ndarray:
    """A view of `array`, (y, x) or (scan y, scan x, ky, kx), of the transformed specimen.

    `operation`: bit 0 mirrors x, bit 1 mirrors y, bit 2 exchanges y and x first.
    """
    if operation & 4:
        array = array.transpose([axis ^ 1 for axis in range(array.ndim)])
    flips = (
        slice(None, None, -1 if operation & 2 else 1),
        slice(None, None, -1 if operation & 1 else 1),
    )
    return array[flips * (array.ndim // 2)]


def inverse(operation: int) -> int:
    """The operation that takes `operation` back."""
    if operation & 4:  # exchanged axes exchange the mirrors
        return 4 | (operation & 1) << 1 | (operation & 2) >> 1
    return operation
