"""Which node is to hold what: the data set listed once, and dealt over the nodes.

share = plan(experiment, ranks)
"""

import os
import re
import zlib
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stemdl import ranks as ranks_module
from stemdl.data import deal, manifest, shards
from stemdl.data.copying import Item
from stemdl.errors import UserError
from stemdl.ranks import Ranks
from stemdl.schema import Experiment

SPLITS = ("train", "dev", "test")
DEALT = "train"  # the split of which each node has a part

Listed = tuple[str, Path, Item | None]  # split, shard, what the manifest says of it


@dataclass(frozen=True)
class Place:
    """Where one rank's node is among the nodes, and where its copies are."""

    node: int
    nodes: list[int]  # of every rank
    target: Path

    @property
    def count(self) -> int:
        """How many nodes there are."""
        return max(self.nodes) + 1


@dataclass(frozen=True)
class Share:
    """What one node holds: files, and the rows of them that it uses."""

    node: int
    nodes: int
    target: Path
    items: list[Item]
    rows: dict[str, list[tuple[str, int, int]]]  # split -> (file, first row, rows)


def locate(experiment: Experiment, ranks: Ranks) -> Place:
    """This rank's node and its directory. All ranks call this.

    Raises:
        UserError: on all ranks: stage.dir is no place for copies of data.dir.
    """
    with ranks.together("looking at stage.dir"):
        base = _base(experiment)
        if ranks.local_rank == 0:
            _refuse_senseless(experiment.data.dir, base)
    nodes = deal.nodes(ranks.collect((ranks_module.host(), ranks.local_rank)))
    node = nodes[ranks.rank]
    return Place(node, nodes, base / f"node-{node}-of-{max(nodes) + 1}")


def plan(experiment: Experiment, ranks: Ranks) -> Share:
    """What this rank's node is to hold. All ranks call this; the source is listed once.

    Raises:
        UserError: on all ranks: no data, fewer samples than nodes, or a senseless stage.dir.
    """
    place = locate(experiment, ranks)
    items = _list(experiment.data.dir, ranks)
    by_split = {split: [item for item in items if item.split == split] for split in SPLITS}
    ranks_of = Counter(place.nodes)
    parts = deal.samples(
        [item.count for item in by_split[DEALT]], [ranks_of[each] for each in range(place.count)]
    )
    if not all(parts):
        total = sum(item.count for item in by_split[DEALT])
        raise UserError(
            f"{experiment.data.dir / DEALT}: {total} samples are fewer than {place.count} nodes; "
            "start fewer nodes"
        )
    whole = {split: [(item.name, 0, item.count) for item in by_split[split]] for split in SPLITS}
    mine = [(by_split[DEALT][shard], first, last) for shard, first, last in parts[place.node]]
    rows = whole | {DEALT: [(item.name, first, last - first) for item, first, last in mine]}
    others = [item for item in items if item.split != DEALT]
    return Share(
        place.node,
        place.count,
        place.target,
        [item for item, _, _ in mine] + others,
        {split: rows[split] for split in SPLITS if rows[split]},
    )


def _list(directory: Path, ranks: Ranks) -> list[Item]:
    """Every shard of the data set, by the manifest or, without one, by headers; on every rank.

    Rank 0 lists; headers are read by all, some each.
    """
    listed: list[Listed] = []
    with ranks.together("listing the data set"):
        if ranks.rank == 0:
            listed = _listed(directory)
    listed = ranks.share(listed)
    with ranks.together("reading the headers of the data set"):
        part = listed[ranks.rank :: ranks.size]
        own = {path: _measured(split, path) for split, path, item in part if item is None}
    measured = {path: item for found in ranks.collect(own) for path, item in found.items()}
    return [item or measured[path] for _, path, item in listed]


def _listed(directory: Path) -> list[Listed]:
    """The data set as its directory and its manifest have it."""
    records = {record["path"]: record for record in manifest.read_manifest(directory) or []}
    found: list[Listed] = []
    for split in SPLITS:
        for path in shards.shard_paths(directory, split):
            record = records.pop(f"{split}/{path.name}", None)
            known = record and (record[key] for key in ("bytes", "count", "checksum"))
            found.append((split, path, Item(split, path.name, *known) if known else None))
    if records:
        raise UserError(f"{directory / min(records)}: listed in {manifest.NAME} but not there")
    if not any(split == DEALT for split, *_ in found):
        raise UserError(
            f"{directory / DEALT}: no shards (*.h5) to stage; run stemdl-data simulate or import, "
            "or set stage.dir to null to read files of another kind in place"
        )
    return found


def _measured(split: str, path: Path) -> Item:
    """What the manifest would say, without reading the file."""
    count, size = shards.open_shard(path).count, path.stat().st_size
    return Item(split, path.name, size, count, shards.fingerprint(path))


def _base(experiment: Experiment) -> Path:
    """The place of this data set below stage.dir: two data sets of one name stay apart."""
    directory = Path(os.path.expandvars(experiment.stage.dir or "")).expanduser()
    unset = re.search(r"\$\w+|\$\{\w+\}", str(directory))
    if unset:
        raise UserError(f"stage.dir is {experiment.stage.dir}: {unset[0]} is not set")
    source = experiment.data.dir.resolve()
    return directory / f"{source.name}-{zlib.crc32(os.fsencode(source)):08x}"


def _refuse_senseless(source: Path, base: Path) -> None:
    """Refuse to copy data onto or into themselves, and a node's part as if it were the whole.

    Raises:
        UserError: that is what stage.dir and data.dir say.
    """
    if shards.read_deal(source) is not None:
        raise UserError(
            f"{source}: was staged itself, and may be one node's part ({shards.DEAL_NAME}); set "
            "data.dir to the data set that it was copied from, or stage.dir to null"
        )
    if any(_same(each, source) for each in (base, *base.absolute().parents)):
        raise UserError(
            f"stage.dir: the copies would be in {base}, within the data set, {source}; set "
            "stage.dir to a disk of the node's own, or to null to read data.dir itself"
        )


def _same(one: Path, other: Path) -> bool:
    """Are these one directory, by whatever name or mount?"""
    with suppress(OSError):
        return one.samefile(other)
    return False
