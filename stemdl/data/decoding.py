"""From where samples lie to a batch in memory, in one pass over it: see decode.c.

    decode = decoders(kinds, normaliser)["cbed"]
    out = np.empty((batch, *decode.shape), decode.dtype)
    scratch = np.empty(decode.scratch, np.uint8)
    fault = decode(files, places, turns, out, scratch)

Other threads of Python work meanwhile.
"""

import ctypes
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from stemdl.data import symmetry
from stemdl.data.normalise import Normaliser
from stemdl.errors import UserError

TYPES = ("float16", "float32", "uint16")
WAYS = ("root", "plain", "copy")  # normalised after the square root, or without; as it is stored
NOT_FINITE, TOO_SHORT, UNREADABLE = 1, 2, 3
BLOCK = 256 << 10  # bytes read at once; these and their float32 stay in a core's cache
IN_MEMORY = -1
PLACE = np.dtype([("file", "i8"), ("place", "i8"), ("start", "i8"), ("step", "i8", 4)])

Kinds = Mapping[str, tuple[tuple[int, ...], np.dtype]]


@dataclass(frozen=True)
class Fault:
    """What is wrong with sample `number` of a batch."""

    number: int
    kind: int  # NOT_FINITE, TOO_SHORT or UNREADABLE
    detail: int  # the byte at which the file ends, or the system's error number


class _Layout(ctypes.Structure):
    _fields_ = (
        ("way", ctypes.c_int64),
        ("shape", ctypes.c_int64 * 4),
        ("block", ctypes.c_int64),
        ("mean", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
    )


class Decoder:
    """Puts samples' arrays of one name together to a batch."""

    def __init__(
        self,
        shape: tuple[int, ...],
        stored: np.dtype,
        way: str,
        mean: np.ndarray | float = 0.0,
        deviation: np.ndarray | float = 1.0,
    ) -> None:
        """
        Args:
            shape: of one sample's array, (Sy, Sx, Ky, Kx) or (H, W).
            stored: dtype, one of TYPES.
            way: one of WAYS.
            mean, deviation: of each detector pixel (Ky, Kx), or of all.
        """
        self.shape, self.stored = shape, stored
        self.size = math.prod(shape) * stored.itemsize  # bytes of one, as stored
        self.dtype = stored if way == "copy" else np.dtype(np.float32)
        four = (1, 1, *shape)[-4:]
        self._statistics = [
            np.ascontiguousarray(np.broadcast_to(np.asarray(each, np.float32), shape[-2:]))
            for each in (mean, 1 / np.asarray(deviation, np.float64))
        ]
        pattern = shape[-2] * shape[-1] * stored.itemsize
        block = max(1, BLOCK // pattern)
        self.scratch = block * pattern  # bytes
        self._layout = _Layout(
            TYPES.index(stored.name) * len(WAYS) + WAYS.index(way),
            (ctypes.c_int64 * 4)(*four),
            block,
            *(each.ctypes.data for each in self._statistics),
        )
        self._turns = _turns(shape)
        self._run = _compiled()

    def __call__(
        self,
        files: np.ndarray,
        places: np.ndarray,
        turns: np.ndarray | None,
        out: np.ndarray,
        scratch: np.ndarray,
    ) -> Fault | None:
        """Fill `out` (B, ...) until something is wrong.

        Args:
            files: descriptors (B,), or IN_MEMORY.
            places: the first byte in the file, or the address, (B,).
            turns: operations of `symmetry` (B,); None: none.
            scratch: memory of `self.scratch` bytes.
        """
        samples = self._turns[np.zeros(len(files), np.int64) if turns is None else turns]
        samples["file"], samples["place"] = files, places
        number, detail = ctypes.c_int64(), ctypes.c_int64()
        kind = self._run(
            ctypes.byref(self._layout),
            samples.ctypes.data,
            len(samples),
            out.ctypes.data,
            scratch.ctypes.data,
            ctypes.byref(number),
            ctypes.byref(detail),
        )
        return Fault(number.value, kind, detail.value) if kind else None


def decoders(kinds: Kinds, normaliser: Normaliser | None) -> dict[str, Decoder]:
    """A decoder for each array of a sample; without a normaliser it leaves them as stored."""
    if normaliser is None:
        return {name: Decoder(shape, dtype, "copy") for name, (shape, dtype) in kinds.items()}
    how: dict[str, tuple[str, np.ndarray | float, np.ndarray | float]] = {
        "cbed": (
            "root" if normaliser.sqrt else "plain",
            normaliser.cbed_mean,
            normaliser.cbed_std,
        ),
        "potential": ("plain", normaliser.potential_mean, normaliser.potential_std),
    }
    return {name: Decoder(shape, dtype, *how[name]) for name, (shape, dtype) in kinds.items()}


def _turns(shape: tuple[int, ...]) -> np.ndarray:
    """Where a stored array goes in its turned self, for each operation: PLACE records."""
    out = np.empty(shape, np.int8)
    places = np.zeros(symmetry.order(shape), PLACE)
    for operation, place in enumerate(places):
        view = symmetry.apply(symmetry.inverse(operation), out)
        place["start"] = view.ctypes.data - out.ctypes.data
        place["step"][-len(shape) :] = view.strides
    return places


@cache
def _compiled() -> Callable[..., Any]:
    found = find_spec("stemdl.data._decode")
    if found is None or found.origin is None:
        raise UserError("stemdl/data/decode.c is not compiled: run scripts/setup or pip install")
    function = ctypes.CDLL(found.origin).decode
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [pointer, pointer, number, pointer, pointer, pointer, pointer]
    return function
