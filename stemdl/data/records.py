"""The LMDB records of the published network: one environment a rank, `batch_train_0.db` and so on.

Keys: `cbed_<i>` and `2d_potential_<i>` (older: `potential_<i>`), raw arrays in C order, beside six
keys that give names, shapes (int64) and dtypes of both. Patterns are (probes, Ky, Kx), x fastest.
Nothing is written, not even LMDB's lock file.
"""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from stemdl.errors import UserError

HEADER = ("input_shape", "output_shape", "input_dtype", "output_dtype", "input_name", "output_name")
SUFFIX = ".db"

Get = Callable[[str], memoryview]


@dataclass(frozen=True)
class Field:
    """One array of every sample."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Header:
    """What an environment holds: `count` samples of patterns (probes, Ky, Kx) and potentials."""

    count: int
    cbed: Field
    potential: Field


def paths(directory: Path, split: str) -> list[Path]:
    """The environments of a split, by number; empty if there are none."""
    pattern = re.compile(rf"batch_{re.escape(split)}_(\d+)\{SUFFIX}")
    found = [(pattern.fullmatch(path.name), path) for path in directory.glob(f"*{SUFFIX}")]
    return [path for _, path in sorted((int(match[1]), path) for match, path in found if match)]


@contextmanager
def reading(path: Path) -> Iterator[Get]:
    """A function from keys to their values, which are valid within the block.

    Raises:
        UserError: no such environment, a damaged or a truncated one; a key that is not there.
    """
    with environment(path).begin(buffers=True) as transaction:

        def get(key: str) -> memoryview:
            value = transaction.get(key.encode())
            if value is None:
                raise UserError(
                    f"{path}: has no key {key!r}; it is truncated, or holds other records"
                )
            return value

        yield get


def read_header(path: Path) -> Header:
    """What the environment says of itself, and whether its first and last sample are there.

    Raises:
        UserError: as `reading`; or a header that makes no sense.
    """
    with reading(path) as get:
        head = {key: bytes(get(key)) for key in HEADER}
        try:
            cbed, potential = (_field(head, which) for which in ("input", "output"))
        except (ValueError, TypeError) as error:
            raise UserError(f"{path}: header cannot be understood ({error})") from error
        count = (environment(path).stat()["entries"] - len(HEADER)) // 2
        header = Header(count, cbed, potential)
        for index in {0, count - 1}:
            for field in (cbed, potential):
                array(path, get, field, index)
    return header


def scan_of(
    path: Path, header: Header, given: tuple[int, int] | None, remedy: str
) -> tuple[int, int]:
    """The scan (Sy, Sx) of each sample's probes: the one that is given, or else a square.

    Raises:
        UserError: the probes are no such scan; `remedy` says what to do.
    """
    probes = header.cbed.shape[0]
    scan = given or (math.isqrt(probes),) * 2
    if math.prod(scan) != probes:
        raise UserError(
            f"{path}: each sample has {probes} probes, which are no scan of {scan[0]} x {scan[1]}; "
            f"{remedy}"
        )
    return scan


def array(path: Path, get: Get, field: Field, index: int) -> np.ndarray:
    """One array of a sample, without a copy: valid as long as `get` is.

    Raises:
        UserError: it is not there, or of another size.
    """
    value = get(f"{field.name}_{index}")
    if len(value) != field.bytes:
        raise UserError(
            f"{path}: record {field.name}_{index} has {len(value)} bytes, wanted {field.shape} of "
            f"{field.dtype}; it is damaged"
        )
    return np.frombuffer(value, field.dtype).reshape(field.shape)


def fill(path: Path, header: Header, index: int, out: dict[str, np.ndarray]) -> None:
    """Copy sample `index` to `out`: "cbed" (Sy, Sx, Ky, Kx), "potential" (H, W)."""
    with reading(path) as get:
        for name, target in out.items():
            found = array(path, get, getattr(header, name), index)
            target[...] = found.reshape(target.shape)


_open: WeakValueDictionary[Path, Any] = WeakValueDictionary()
_opening = Lock()


def environment(path: Path) -> Any:
    """The open environment. Who reads often holds it: it closes when nobody does.

    LMDB forbids a process to open one twice, hence the list of what is open.
    """
    with _opening:
        found = _open.get(path)
        if found is None:
            found = _open[path] = _opened(path)
        return found


def _opened(path: Path) -> Any:
    try:
        import lmdb
    except ImportError as error:
        raise UserError(f"{path}: needs the package lmdb; install stemdl[formats]") from error
    if not path.exists():
        raise UserError(f"{path}: no such file")
    try:
        found = lmdb.open(str(path), subdir=path.is_dir(), readonly=True, lock=False)
    except lmdb.Error as error:
        raise UserError(f"{path}: cannot be read as LMDB ({error})") from error
    # To read behind the end of a mapped file would kill the process.
    file = path / "data.mdb" if path.is_dir() else path
    wanted = (found.info()["last_pgno"] + 1) * found.stat()["psize"]
    if file.stat().st_size < wanted:
        found.close()
        raise UserError(
            f"{path}: truncated ({file.stat().st_size} bytes are there, wanted {wanted}); copy it "
            "again"
        )
    return found


def _field(head: dict[str, bytes], which: str) -> Field:
    """Name, dtype and shape of the input or the output, from the header."""
    shape = tuple(int(n) for n in np.frombuffer(head[f"{which}_shape"], np.int64))
    return Field(head[f"{which}_name"].decode(), np.dtype(head[f"{which}_dtype"].decode()), shape)
