"""Samples from a split's files to arrays in memory, as they are stored or decoded on the way.

    read = reader(split)
    read(np.array([3, 17]))     # {"cbed": (2, Sy, Sx, Ky, Kx), "potential": (2, H, W)}

Any number of threads may read at once: they wait for the disk without Python's lock.
"""

import os
import weakref
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from stemdl.data import decoding, records, shards
from stemdl.data.decoding import Decoder, Fault
from stemdl.data.normalise import Normaliser, odd_number
from stemdl.errors import UserError

OPEN_FILES = 128  # shards held open by one reader
ALIGNMENT = 64  # bytes; TensorFlow takes over arrays on such a boundary without a copy

Sample = dict[str, np.ndarray]
Reader = Callable[[np.ndarray, np.ndarray | None], Sample]


def reader(split: shards.Split, normaliser: Normaliser | None = None) -> Reader:
    """A function from sample indices (B,) to their arrays, stacked: normalised, or as stored.

    Its second argument, if not None, has the symmetry to apply to each of the samples (B,).

    The function raises a UserError for a file that is gone, truncated or holds NaN or infinity.
    """
    hold = lru_cache(OPEN_FILES)(_held)
    memory, decoders = Memory(), decoding.decoders(_kinds(split), normaliser)

    def read(index: np.ndarray, turns: np.ndarray | None = None) -> Sample:
        samples = shards.locate_all(split, index)
        lying = [_lying(shard, row, decoders, hold) for shard, row in samples]
        out = {}
        for name, decode in decoders.items():
            _, files, places = zip(*(each[name] for each in lying), strict=True)
            out[name] = memory.take((len(index), *decode.shape), decode.dtype)
            scratch = memory.take((decode.scratch,), np.dtype(np.uint8))
            fault = decode(np.array(files), np.array(places), turns, out[name], scratch)
            if fault is not None:
                raise _explained(fault, name, *samples[fault.number])
        return out

    return read


def _kinds(split: shards.Split) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shape and dtype of a sample's arrays, by name: as stored, or float32 for unusual types."""
    first = split.shards[0]
    found: dict[str, tuple[tuple[int, ...], np.dtype]] = {
        "cbed": (first.cbed_shape, first.cbed_dtype)
    }
    if first.potential_shape is not None:
        found["potential"] = (first.potential_shape, first.potential_dtype)
    return {
        name: (shape, np.dtype(dtype.name if dtype.name in decoding.TYPES else "float32"))
        for name, (shape, dtype) in found.items()
    }


class Memory:
    """Arrays whose memory is used again when nobody holds them any more.

    Fresh memory costs almost as much as reading into it: the kernel clears it page by page.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[tuple[int, ...], np.dtype], list[np.ndarray]] = {}

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An array with whatever its memory held. Hold the array itself, not a view of it."""
        free = self._free.setdefault((shape, dtype), [])
        try:
            memory = free.pop()
        except IndexError:
            memory = aligned(shape, dtype)
        array = memory.view()
        weakref.finalize(array, free.append, memory).atexit = False
        return array


def _held(path: Path) -> Any:
    """The open file, to be held for the next sample."""
    return records.environment(path) if path.suffix == records.SUFFIX else _Descriptor(path)


def _lying(
    shard: shards.Shard, row: int, decoders: Mapping[str, Decoder], hold: Callable[[Path], Any]
) -> dict[str, tuple[Any, int, int]]:
    """Where the arrays of a sample lie: what to hold on to, file descriptor and byte or address."""
    begins = {
        name: offset
        for name, offset, dtype in (
            ("cbed", shard.cbed_offset, shard.cbed_dtype),
            ("potential", shard.potential_offset, shard.potential_dtype),
        )
        if offset is not None and name in decoders and dtype == decoders[name].stored
    }
    if decoders.keys() == begins.keys():
        held = hold(shard.path)
        return {
            name: (held, held.number, begins[name] + (shard.first + row) * decode.size)
            for name, decode in decoders.items()
        }
    if shard.records is not None:  # opening an environment anew takes longer than reading
        hold(shard.path)
    found = shards.read_samples(shard, [row])
    arrays = {
        name: np.ascontiguousarray(found[name][0], decode.stored)
        for name, decode in decoders.items()
    }
    return {name: (array, decoding.IN_MEMORY, array.ctypes.data) for name, array in arrays.items()}


def _explained(fault: Fault, name: str, shard: shards.Shard, row: int) -> UserError:
    if fault.kind == decoding.NOT_FINITE:
        return odd_number(shard, name, row)
    if fault.kind == decoding.TOO_SHORT:
        return UserError(f"{shard.path}: ends at byte {fault.detail}; make or copy it again")
    return UserError(f"{shard.path}: cannot be read ({os.strerror(fault.detail)})")


class _Descriptor:
    """A file open for reading, closed when the last reader lets go of it."""

    def __init__(self, path: Path) -> None:
        try:
            self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from error

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array on a boundary of ALIGNMENT, with whatever its memory held."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)
