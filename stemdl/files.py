"""Files that appear whole or not at all."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import stemdl
from stemdl.errors import UserError


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`; fsync and rename it to `path` if the block ends well.

    After an exception the temporary file is removed and `path` is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        os.chmod(temporary, 0o666 & ~_umask())
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def publish(temporary: Path, path: Path) -> None:
    """Make the finished file `temporary` durable, then rename it to `path`, durably too."""
    _fsync(temporary)
    os.replace(temporary, path)
    _fsync(path.parent)


def write_bytes(path: Path, content: bytes) -> None:
    with appearing(path) as temporary:
        temporary.write_bytes(content)


def write_json(path: Path, schema: str, content: dict[str, Any]) -> None:
    """Write `content` with the fields that every JSON file of stemdl has: `schema` and version.

    `schema` is a name and a version, such as "stemdl.manifest/1".
    """
    head = {"schema": schema, "stemdl_version": stemdl.__version__}
    text = json.dumps(head | content, indent=2, allow_nan=False, default=_plain)
    write_bytes(path, (text + "\n").encode())


def read_json(path: Path, schema: str) -> dict[str, Any]:
    """Read a file written by write_json.

    Raises:
        UserError: the file is missing, is not JSON, or is of another schema.
    """
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"{path}: is not JSON ({error})") from error
    found = content.get("schema") if isinstance(content, dict) else None
    if found != schema:
        raise UserError(f"{path}: schema is {found!r}, wanted {schema!r}")
    return content


def human_bytes(count: float) -> str:
    """1536 -> '1.5 kB'; powers of 1000, as disks and networks are sold."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} PB"


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _plain(value: Any) -> Any:
    """JSON's view of numpy scalars, arrays and paths."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not JSON")
