"""The LMDB records of the published network: input patterns and potentials, one after the other.

Keys: `cbed_<i>` and `2d_potential_<i>` (older: `potential_<i>`), raw arrays in C order, beside six
keys that give names, shapes (int64) and dtypes of both. Patterns are (probes, Ky, Kx), x fastest.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_tools.importers.calibration import Known
from data_tools.importers.scan import Given, Scan, library
from stemdl.errors import UserError

HEADER = ("input_shape", "output_shape", "input_dtype", "output_dtype", "input_name", "output_name")

Get = Callable[[str], memoryview]
Record = tuple[str, np.dtype, tuple[int, ...]]  # key, dtype, shape


def open_records(path: Path, given: Given, stack: ExitStack) -> list[Scan]:
    """The samples of an LMDB environment (a folder or a file), each a scan with its potential.

    Raises:
        UserError: no such records, or the probes are no square and --scan is not given.
    """
    lmdb = library("lmdb", path)
    try:
        environment = stack.enter_context(
            lmdb.open(str(path), subdir=path.is_dir(), readonly=True, lock=False, max_readers=1)
        )
        transaction = stack.enter_context(environment.begin(buffers=True))
    except lmdb.Error as error:
        raise UserError(f"{path}: cannot be read as LMDB ({error})") from error

    def get(key: str) -> memoryview:
        value = transaction.get(key.encode())
        if value is None:
            raise UserError(f"{path}: has no key {key!r}; it is truncated, or holds other records")
        return value

    head = {key: bytes(get(key)) for key in HEADER}
    name, dtype, shape = _described(head, "input")
    potential = _described(head, "output")
    scan = given.scan or (math.isqrt(shape[0]),) * 2
    if math.prod(scan) != shape[0]:
        raise UserError(
            f"{path}: each sample has {shape[0]} probes, which are no scan of {scan[0]} x "
            f"{scan[1]}; give --scan Y,X"
        )
    # As fftshift leaves them: the zero frequency is pixel n // 2.
    origin = Known((float(shape[1] // 2), float(shape[2] // 2)), "assumed: zero frequency")
    count = (transaction.stat()["entries"] - len(HEADER)) // 2
    stored = (*scan, *shape[1:])
    return [
        Scan(
            f"{path}:{name}_{index}",
            stored,
            dtype,
            partial(_rows, get, (f"{name}_{index}", dtype, stored)),
            known={"origin": origin, "rotation": Known(0.0, "simulated")},
            potential=partial(_potential, get, potential, index),
        )
        for index in range(count)
    ]


def _described(head: dict[str, bytes], which: str) -> Record:
    """Name, dtype and shape of the input or the output, from the header."""
    shape = tuple(int(n) for n in np.frombuffer(head[f"{which}_shape"], np.int64))
    return head[f"{which}_name"].decode(), np.dtype(head[f"{which}_dtype"].decode()), shape


def _rows(get: Get, record: Record, start: int, stop: int) -> NDArray:
    return _array(get, record)[start:stop]


def _potential(get: Get, record: Record, index: int) -> NDArray:
    name, dtype, shape = record
    return _array(get, (f"{name}_{index}", dtype, shape[-2:]))


def _array(get: Get, record: Record) -> NDArray:
    key, dtype, shape = record
    value = get(key)
    if len(value) != math.prod(shape) * dtype.itemsize:
        raise UserError(
            f"record {key}: has {len(value)} bytes, wanted {shape} of {dtype}; it is damaged"
        )
    return np.frombuffer(value, dtype).reshape(shape)
