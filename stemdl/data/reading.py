"""Samples from a split's files to arrays in memory, as they are stored.

    read = reader(split)
    read(np.array([3, 17]))     # {"cbed": (2, Sy, Sx, Ky, Kx), "potential": (2, H, W)}

Any number of threads may read at once: they wait for the disk without Python's lock.
"""

import os
import weakref
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from stemdl.data import records, shards, symmetry
from stemdl.data.normalise import check_finite, not_finite
from stemdl.errors import UserError

OPEN_FILES = 128  # shards held open by one reader
ALIGNMENT = 64  # bytes; TensorFlow takes over arrays on such a boundary without a copy

Sample = dict[str, np.ndarray]
Reader = Callable[[np.ndarray, np.ndarray | None], Sample]


def kinds(split: shards.Split) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shape and stored dtype of a sample's arrays, by name."""
    first = split.shards[0]
    found: dict[str, tuple[tuple[int, ...], np.dtype]] = {
        "cbed": (first.cbed_shape, first.cbed_dtype)
    }
    if first.potential_shape is not None:
        found["potential"] = (first.potential_shape, first.potential_dtype)
    return found


def reader(split: shards.Split) -> Reader:
    """A function from sample indices (B,) to their arrays, stacked, as stored.

    Its second argument, if not None, has the symmetry to apply to each of the samples (B,).

    The function raises a UserError for a file that is gone, truncated or holds NaN or infinity.
    """
    hold = lru_cache(OPEN_FILES)(_held)
    memory, arrays = Memory(), kinds(split)

    def read(index: np.ndarray, turns: np.ndarray | None = None) -> Sample:
        out = {
            name: memory.take((len(index), *shape), dtype)
            for name, (shape, dtype) in arrays.items()
        }
        places = shards.locate_all(split, index)
        for place, (shard, row) in enumerate(places):
            target = {name: array[place] for name, array in out.items()}
            turn = 0 if turns is None else int(turns[place])
            if turn == 0:
                _read_sample(shard, row, target, hold)
                continue
            # A sample that is to be turned is read apart and copied once, turned.
            stored = {name: memory.take(each.shape, each.dtype) for name, each in target.items()}
            _read_sample(shard, row, stored, hold)
            for name, array in stored.items():
                target[name][...] = symmetry.apply(turn, array)
        if any(not_finite(array) for array in out.values()):
            for place, (shard, row) in enumerate(places):
                check_finite(shard, row, {name: array[place] for name, array in out.items()})
        return out

    return read


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
            memory = _aligned(shape, dtype)
        array = memory.view()
        weakref.finalize(array, free.append, memory).atexit = False
        return array


def _held(path: Path) -> Any:
    """The open file, to be held for the next sample."""
    return records.environment(path) if path.suffix == records.SUFFIX else _Descriptor(path)


def _read_sample(shard: shards.Shard, row: int, out: Sample, hold: Callable[[Path], Any]) -> None:
    """Fill `out` with one sample, by its byte ranges where the shard is contiguous."""
    if shard.records is not None:
        hold(shard.path)
        records.fill(shard.path, shard.records, shard.first + row, out)
        return
    begins = {"cbed": shard.cbed_offset, "potential": shard.potential_offset}
    offsets = {name: begin for name, begin in begins.items() if begin is not None}
    if not out.keys() <= offsets.keys():
        for name, array in shards.read_samples(shard, [row]).items():
            out[name][...] = array[0]
        return
    file = hold(shard.path)
    for name, array in out.items():
        file.fill(array, offsets[name] + (shard.first + row) * array.nbytes)


class _Descriptor:
    """A file open for reading, closed when the last reader lets go of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from error

    def fill(self, array: np.ndarray, offset: int) -> None:
        """Fill `array` with the file's bytes from `offset` on."""
        view = memoryview(array.data).cast("B")
        while view:
            try:
                count = os.preadv(self.number, [view], offset)
            except OSError as error:
                raise UserError(f"{self.path}: cannot be read ({error.strerror})") from error
            if count == 0:
                raise UserError(f"{self.path}: ends at byte {offset}; make or copy it again")
            view, offset = view[count:], offset + count

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)
