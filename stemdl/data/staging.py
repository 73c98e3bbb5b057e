"""The data set from the global file system to storage in the node.

    directory = stage(experiment, ranks)         # where to read from; copies if stage.dir is set

The training samples are dealt over the nodes, a run of shards to each; the other splits go to every
node. A directory belongs to one deal (node 3 of 8), so that what another deal left is never mixed
in. Whatever stops a copy, the next one goes on with the files that are missing.
"""

import fcntl
import os
import random
import re
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage

from stemdl import files
from stemdl import ranks as ranks_module
from stemdl.console import progress, say
from stemdl.data import copying, deal, manifest, shards, stage_report
from stemdl.data.copying import Item
from stemdl.errors import UserError
from stemdl.ranks import Ranks
from stemdl.schema import Experiment

SPLITS = ("train", "dev", "test")
DEALT = "train"  # the split of which each node has a part


@dataclass(frozen=True)
class Share:
    """What one node holds: files, and the rows of them that it uses."""

    node: int
    nodes: int
    target: Path
    items: list[Item]
    rows: dict[str, list[tuple[str, int, int]]]  # split -> (file, first row, rows)


def stage(experiment: Experiment, ranks: Ranks) -> Path:
    """Copy the data set to `stage.dir` on every node; all ranks call this.

    Returns:
        The directory to read from: `data.dir` itself if `stage.dir` is null.

    Raises:
        UserError: on all ranks: no data, corrupt source, no space, fewer samples than ranks.
    """
    if experiment.stage.dir is None:
        return experiment.data.dir
    begun = time.perf_counter()
    share = plan(experiment, ranks)
    with _alone(share.target, ranks):
        with ranks.together("looking at what is staged"):
            mine = _my_lanes(experiment, share, ranks)
            missing = [
                [item for item in lane if not copying.is_staged(item, _path(share, item))]
                for lane in mine
            ]
        wanted = sum(item.bytes for lane in missing for item in lane)
        _check_space(experiment, share, wanted, ranks)
        with ranks.together("staging"):
            seconds = _copy(experiment, share, missing, ranks)
        with ranks.together("writing the deal"):
            if ranks.local_rank == 0:
                _write_deal(share)
    done = stage_report.Done(
        node=share.node,
        host=ranks_module.host(),
        directory=share.target,
        holds=sum(item.bytes for item in share.items),
        copied=wanted,
        seconds=seconds,
        warnings=stage_report.warnings(experiment.data.dir, share.target),
    )
    stage_report.publish(experiment.run / "stage.json", done, ranks, time.perf_counter() - begun)
    return share.target


def plan(experiment: Experiment, ranks: Ranks) -> Share:
    """What this rank's node is to hold. Rank 0 alone looks at the source."""
    items: list[Item] = []
    with ranks.together("listing the data set"):
        if ranks.rank == 0:
            items = _list(experiment.data.dir)
        base = _base(experiment)
    items = ranks.share(items)
    nodes = deal.nodes(ranks.collect((ranks_module.host(), ranks.local_rank)))
    node, count = nodes[ranks.rank], max(nodes) + 1
    by_split = {split: [item for item in items if item.split == split] for split in SPLITS}
    parts = deal.samples(
        [item.count for item in by_split[DEALT]], [nodes.count(each) for each in range(count)]
    )
    if not all(parts):
        total = sum(item.count for item in by_split[DEALT])
        raise UserError(
            f"{experiment.data.dir / DEALT}: {total} samples are fewer than {count} nodes; "
            "start fewer nodes"
        )
    whole = {split: [(item.name, 0, item.count) for item in by_split[split]] for split in SPLITS}
    mine = [(by_split[DEALT][shard], first, last) for shard, first, last in parts[node]]
    rows = whole | {DEALT: [(item.name, first, last - first) for item, first, last in mine]}
    others = [item for item in items if item.split != DEALT]
    return Share(
        node,
        count,
        base / f"node-{node}-of-{count}",
        [item for item, _, _ in mine] + others,
        {split: rows[split] for split in SPLITS if rows[split]},
    )


def _list(directory: Path) -> list[Item]:
    """Every shard of the data set, from the manifest or, without one, from the headers."""
    listed = manifest.read_manifest(directory) or []
    records = {record["path"]: record for record in listed}
    items = []
    for split in SPLITS:
        for path in shards.shard_paths(directory, split):
            record = records.pop(f"{split}/{path.name}", None)
            if record is None:
                header = shards.open_shard(path)
                record = {
                    "bytes": path.stat().st_size,
                    "count": header.count,
                    "checksum": shards.fingerprint(path),
                }
            size, count, checksum = (record[key] for key in ("bytes", "count", "checksum"))
            items.append(Item(split, path.name, size, count, checksum))
    if records:
        raise UserError(f"{directory / min(records)}: listed in {manifest.NAME} but not there")
    if not any(item.split == DEALT for item in items):
        raise UserError(f"{directory / DEALT}: no shards (*.h5); run stemdl-data simulate")
    return items


def _base(experiment: Experiment) -> Path:
    """The place of this data set below stage.dir: two data sets of one name stay apart."""
    directory = Path(os.path.expandvars(experiment.stage.dir or "")).expanduser()
    unset = re.search(r"\$\w+|\$\{\w+\}", str(directory))
    if unset:
        raise UserError(f"stage.dir is {experiment.stage.dir}: {unset[0]} is not set")
    source = experiment.data.dir.resolve()
    return directory / f"{source.name}-{zlib.crc32(os.fsencode(source)):08x}"


def _path(share: Share, item: Item) -> Path:
    return share.target / item.split / item.name


def _my_lanes(experiment: Experiment, share: Share, ranks: Ranks) -> list[list[Item]]:
    """The files that this rank copies, one list a stream; the node's streams are dealt to ranks."""
    lanes = deal.lanes([item.bytes for item in share.items], experiment.stage.streams)
    return [
        [share.items[place] for place in lane]
        for lane in lanes[ranks.local_rank :: ranks.local_size]
    ]


@contextmanager
def _alone(target: Path, ranks: Ranks) -> Iterator[None]:
    """Hold every node's directory against other jobs; wait while one of them has it.

    All or nothing, so that two jobs never wait for each other. Files that a killed job left
    half-written are removed: nobody else is writing.
    """
    lock: int | None = None
    with ranks.together("locking the staging directory"):
        if ranks.local_rank == 0:
            try:
                target.mkdir(parents=True, exist_ok=True)
                lock = os.open(target / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
            except OSError as error:
                raise UserError(f"{target}: cannot be written ({error.strerror})") from error
    try:
        waiting = False
        while not all(ranks.collect(lock is None or _locked(lock))):
            if lock is not None:
                fcntl.flock(lock, fcntl.LOCK_UN)
            if not waiting:
                say(f"stage: another job is staging to {target}; waiting for it", rank=ranks.rank)
            waiting = True
            time.sleep(ranks.share(random.uniform(0.1, 0.5)))
        if lock is not None:
            for left in target.glob("*/.*.tmp"):
                left.unlink(missing_ok=True)
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _check_space(experiment: Experiment, share: Share, wanted: int, ranks: Ranks) -> None:
    """Refuse before the first byte what would not fit on a node."""
    on_node = sum(size for node, size in ranks.collect((share.node, wanted)) if node == share.node)
    with ranks.together("looking for space"):
        free = disk_usage(share.target).free
        keep = experiment.stage.keep_free * 1e9
        if on_node and on_node + keep > free:
            raise UserError(
                f"{share.target}: {files.human_bytes(free)} are free, wanted "
                f"{files.human_bytes(on_node)} for the data and {files.human_bytes(keep)} to stay "
                "free (stage.keep_free); free space, change stage.dir or start more nodes"
            )


def _copy(experiment: Experiment, share: Share, lanes: list[list[Item]], ranks: Ranks) -> float:
    """Copy each lane in a thread of its own; seconds taken. The first failure ends all."""
    begun = time.perf_counter()
    failed = False
    bar = progress(None, "stage", total=sum(map(len, lanes)), unit="shard", rank=ranks.rank)

    def run(lane: list[Item]) -> None:
        nonlocal failed
        for item in lane:
            if failed:
                return
            try:
                source = experiment.data.dir / item.split / item.name
                copying.copy(item, source, _path(share, item), experiment.stage.block << 20)
            except BaseException:
                failed = True
                raise
            bar.update()

    with bar, ThreadPoolExecutor(max(1, len(lanes))) as pool:
        for future in [pool.submit(run, lane) for lane in lanes]:
            future.result()
    return time.perf_counter() - begun


def _write_deal(share: Share) -> None:
    content = {
        "node": share.node,
        "nodes": share.nodes,
        "parts": [DEALT] if share.nodes > 1 else [],
        "splits": share.rows,
    }
    files.write_json(share.target / shards.DEAL_NAME, shards.DEAL, content)
