"""The LMDB records of the published network as scans; `stemdl.data.records` describes them."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path

from numpy.typing import NDArray

from data_tools.importers.calibration import Known
from data_tools.importers.scan import Given, Scan
from stemdl.data import records
from stemdl.data.records import Field, Get


def open_records(path: Path, given: Given, stack: ExitStack) -> list[Scan]:
    """The samples of an LMDB environment (a folder or a file), each a scan with its potential.

    Raises:
        UserError: no such records, or the probes are no square and --scan is not given.
    """
    header = records.read_header(path)
    get = stack.enter_context(records.reading(path))
    _, *detector = header.cbed.shape
    scan = records.scan_of(path, header, given.scan, "give --scan Y,X")
    # As fftshift leaves them: the zero frequency is pixel n // 2.
    origin = Known((float(detector[0] // 2), float(detector[1] // 2)), "assumed: zero frequency")
    stored = (*scan, *detector)
    return [
        Scan(
            f"{path}:{header.cbed.name}_{index}",
            stored,
            header.cbed.dtype,
            partial(_rows, path, get, header.cbed, index, stored),
            known={"origin": origin, "rotation": Known(0.0, "simulated")},
            potential=partial(_potential, path, get, header.potential, index),
        )
        for index in range(header.count)
    ]


def _rows(
    path: Path, get: Get, field: Field, index: int, shape: tuple[int, ...], start: int, stop: int
) -> NDArray:
    return records.array(path, get, field, index).reshape(shape)[start:stop]


def _potential(path: Path, get: Get, field: Field, index: int) -> NDArray:
    return records.array(path, get, field, index).reshape(field.shape[-2:])
