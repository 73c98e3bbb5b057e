"""stemdl-data import: scans of other people's files into shards.

    convert(Path("scan.emd"), Path("data/measured"), given, Wish(match=Path("runs/demo")))

Shards appear under DATA/SPLIT, whole or not at all, and are entered in DATA/manifest.json. Each
sample is one field; `scan_start` in its record says where in the scan it was cut, and the shard's
provenance says what was done to it.
"""

import glob
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import stemdl
from data_tools import importers
from data_tools.importers.fields import fields
from data_tools.importers.prepare import Prepared, Wish, is_whole, prepare
from data_tools.importers.scan import Given, Scan
from stemdl import files
from stemdl.console import progress, say
from stemdl.data import manifest, shards, trained_on
from stemdl.data.trained_on import TrainedOn
from stemdl.errors import UserError

SHARD_BYTES = 256 << 20  # of patterns in a shard, about


def convert(
    path: Path, data: Path, given: Given, wish: Wish, *, dry_run: bool = False
) -> list[Path]:
    """Import all scans of a file; return the shards written, none in a dry run.

    Raises:
        UserError: whatever keeps the file from being read, calibrated, or brought to the wanted
            sampling; shards of that name are there already, or of another kind.
    """
    kind = None if wish.match is None else trained_on.load(wish.match)
    name = wish.name or path.stem
    folder = data / wish.split
    taken = sorted(folder.glob(f"{glob.escape(name)}-[0-9]*.h5"))
    if taken and not dry_run:
        raise UserError(
            f"{taken[0]}: is there already; give --name, or delete {folder / name}-*.h5 to import "
            "them again"
        )
    with importers.read(path, given) as scans:
        first = prepare(scans[0], wish, kind)
        _show(first, scans, kind)
        if dry_run:
            return []
        _check_neighbours(folder, first)
        written: list[Path] = []
        try:
            samples = _samples(path, scans, first, wish, kind)
            total = len(scans) * first.cut.count
            for samples_of_shard in _batches(progress(samples, "importing", total=total)):
                target = folder / f"{name}-{len(written):05d}.h5"
                _write(target, samples_of_shard, first, _provenance(path, first, len(scans)))
                written.append(target)
            _enter(data, written)
        except BaseException:
            for target in written:
                target.unlink(missing_ok=True)
            raise
    return written


def _show(first: Prepared, scans: list[Scan], kind: TrainedOn | None) -> None:
    scan, cut, axes = first.scan, first.cut, first.axes
    say(f"{scan.where}: {_by(scan.shape[:2])} probes, {_by(scan.shape[2:])} pixels, {scan.dtype}")
    if scan.axes is not None:
        say(f"  {'axes':14}{', '.join(scan.axes.value)}  ({scan.axes.source})")
    for line in first.calibration.lines():
        say(f"  {line}")
    for warning in first.warnings:
        say(f"warning: {warning}")
    if len(scans) > 1:
        say(f"and {len(scans) - 1} more scans like it")
    say(
        f"fields: {len(scans) * cut.count} of {_by(cut.field)} probes every {axes.scan_step:.4g} "
        f"Å, {_by(cut.detector.shape)} pixels of {axes.detector_step:.4g} 1/Å"
        + ("" if kind is None else ", as the network was trained on")
    )
    if scan.potential is not None and not is_whole(scan, cut):
        say("the file's potentials are left out: they belong to whole scans")


def _check_neighbours(folder: Path, first: Prepared) -> None:
    """A split holds samples of one kind: say so before hours of work, not after."""
    others = sorted(folder.glob("*.h5"))
    if not others:
        return
    other = shards.open_shard(others[0])
    shape = (*first.cut.field, *first.cut.detector.shape)
    if (other.cbed_shape, other.axes) != (shape, first.axes):
        raise UserError(
            f"{others[0]}: holds fields {other.cbed_shape} with {other.axes}, these are {shape} "
            f"with {first.axes}; import to another DATA or --split"
        )


@dataclass(frozen=True)
class Sample:
    cbed: NDArray  # (Sy, Sx, Ky, Kx)
    record: NDArray[np.void]  # () SAMPLE
    potential: NDArray[np.float32] | None


def _samples(
    path: Path, scans: list[Scan], first: Prepared, wish: Wish, kind: TrainedOn | None
) -> Iterator[Sample]:
    index = 0
    for scan in scans:
        ready = first if scan is first.scan else prepare(scan, wish, kind)
        if ready.axes != first.axes or ready.cut.detector.shape != first.cut.detector.shape:
            raise UserError(
                f"{scan.where}: would have {ready.axes}, others of the file {first.axes}; give "
                "--detector-step in 1/Å, or --origin"
            )
        potential = None
        if scan.potential is not None and is_whole(scan, ready.cut):
            potential = scan.potential().astype(np.float32)
        for start, patterns in fields(scan, ready.cut):
            with np.errstate(over="ignore"):
                cbed = (patterns * np.float32(ready.scale)).astype(wish.dtype)
            if not np.isfinite(cbed).all():
                raise UserError(
                    f"{scan.where}: intensities reach {patterns.max() * ready.scale:g}, too much "
                    f"for {wish.dtype}; give --dtype float32 or --beam"
                )
            yield Sample(cbed, _record(path, ready, wish, start, index), potential)
            index += 1


def _record(
    path: Path, ready: Prepared, wish: Wish, start: tuple[int, int], index: int
) -> NDArray[np.void]:
    """The sample's row of the table; NaN where nobody knows."""
    record = np.zeros((), shards.SAMPLE)
    for name in ("defocus", "cs", "thickness", "dose", "mean_z"):
        record[name] = math.nan
    for name in ("energy", "semi_angle"):
        known = getattr(ready.calibration, name)
        record[name] = math.nan if known is None else known.value
    record["material"] = ready.scan.where.removeprefix(f"{path.parent}/").encode()[-96:]
    for name, value in ready.scan.sample.items():
        record[name] = value.encode() if isinstance(value, str) else value
    if wish.material is not None:
        record["material"] = wish.material.encode()
    record["index"], record["scan_start"] = index, start
    return record


def _batches(samples: Iterator[Sample]) -> Iterator[list[Sample]]:
    """Samples by the shard."""
    batch: list[Sample] = []
    for sample in samples:
        batch.append(sample)
        if (len(batch) + 1) * sample.cbed.nbytes > SHARD_BYTES:
            yield batch
            batch = []
    if batch:
        yield batch


def _write(target: Path, samples: list[Sample], first: Prepared, provenance: str) -> None:
    potentials = [sample.potential for sample in samples if sample.potential is not None]
    shards.write(
        target,
        cbed=np.stack([sample.cbed for sample in samples]),
        potential=np.stack(potentials) if potentials else None,
        columns=np.zeros(0, shards.COLUMN),
        samples=np.stack([sample.record for sample in samples]),
        axes=first.axes,
        creator=f"stemdl-data import {stemdl.__version__}",
        provenance=provenance,
        cbed_unit=first.unit,
    )


def _provenance(path: Path, first: Prepared, scans: int) -> str:
    """Where the patterns come from and what was done to them, as JSON."""
    cut = first.cut
    done: dict[str, Any] = {
        "source": path.name,
        "scan": first.scan.where.removeprefix(str(path)).lstrip(":"),
        "scans": scans,
        "shape": first.scan.shape,
        "axes": first.scan.axes and list(first.scan.axes.value),
        "calibration": [" ".join(line.split()) for line in first.calibration.lines()],
        "field": cut.field,
        "scan_ratio": cut.ratio,
        "scale": first.scale,
    }
    return json.dumps(done, ensure_ascii=False)


def _enter(data: Path, written: list[Path]) -> None:
    """Add shards to DATA/manifest.json."""
    path = data / manifest.NAME
    content = files.read_json(path, manifest.SCHEMA) if path.exists() else {"shards": []}
    records = {record["path"]: record for record in content["shards"]}
    records |= {record["path"]: record for record in map(manifest.shard_record, written)}
    content["shards"] = [records[name] for name in sorted(records)]
    content.pop("stemdl_version", None)  # of the last writer
    files.write_json(path, manifest.SCHEMA, content)


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
