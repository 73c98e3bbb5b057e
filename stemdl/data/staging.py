"""The data set from the global file system to storage in the node.

    with staged(experiment, ranks) as directory:    # copies, if stage.dir is set
        ...                                         # reads from there
    purge(experiment, ranks)                        # removes the copies

The training samples are dealt over the nodes, a run of shards to each; the other splits go to every
node. A directory belongs to one deal (node 3 of 8), so that what another deal left is never mixed
in. Whatever stops a copy, the next one goes on with the files that are missing.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import disk_usage

from stemdl import files, signals
from stemdl import ranks as ranks_module
from stemdl.console import progress, say
from stemdl.data import broadcasting, claims, copying, deal, shards, stage_report
from stemdl.data.copying import Item
from stemdl.data.stage_plan import DEALT, SPLITS, Share, locate, plan
from stemdl.errors import Interrupted, UserError
from stemdl.ranks import Ranks
from stemdl.schema import Experiment

Lanes = list[list[Item]]  # files that a rank copies, one list a stream
Received = Callable[[], str | None]  # the signal that came, if one has


@contextmanager
def staged(experiment: Experiment, ranks: Ranks, *, verify: bool = False) -> Iterator[Path]:
    """Copy the data set to `stage.dir` on every node, and keep it there for the block's length.

    All ranks call this. No other job purges the copies meanwhile.

    Args:
        verify: read the copies that are there already, and make damaged ones again.

    Yields:
        The directory to read from: `data.dir` itself if `stage.dir` is null.

    Raises:
        UserError: on all ranks: no data, corrupt source, no space, fewer samples than ranks.
        Interrupted: on all ranks: a signal came; what is copied stays.
    """
    if experiment.stage.dir is None:
        yield experiment.data.dir
        return
    begun = time.perf_counter()
    share = plan(experiment, ranks)
    with claims.using(share.target, ranks):
        with signals.listening() as received:
            copied, seconds = _fill(experiment, share, ranks, received, verify)
        done = stage_report.Done(
            node=share.node,
            host=ranks_module.host(),
            directory=share.target,
            holds=sum(item.bytes for item in share.items),
            copied=copied,
            seconds=seconds,
            warnings=stage_report.warnings(experiment.data.dir, share.target)
            if ranks.local_rank == 0
            else [],
        )
        wall = time.perf_counter() - begun
        stage_report.publish(experiment.run / "stage.json", done, ranks, wall)
        yield share.target


def stage(experiment: Experiment, ranks: Ranks, *, verify: bool = False) -> Path:
    """`staged` ahead of the jobs that read the copies."""
    with staged(experiment, ranks, verify=verify) as directory:
        return directory


def purge(experiment: Experiment, ranks: Ranks) -> None:
    """Remove the experiment's copies from every node; all ranks call this.

    Only what staging made is removed, and nothing on a node where another job reads or awaits it.

    Raises:
        UserError: on all ranks: stage.dir is null, or a file cannot be removed.
    """
    if experiment.stage.dir is None:
        raise UserError("stage.dir is null: nothing is staged that could be purged")
    place = locate(experiment, ranks)
    freed: int | None = 0
    with ranks.together("purging"):
        if ranks.local_rank == 0 and place.target.is_dir():
            with claims.unused(place.target) as free:
                freed = _remove(place.target) if free else None
    found = ranks.collect(freed)
    used = found.count(None)
    say(
        f"stage: purged {files.human_bytes(sum(filter(None, found)))} from {place.count - used} of "
        f"{place.count} node{'s' if place.count > 1 else ''}: {place.target}"
        + (f"; {used} kept: another job uses the copies there" if used else ""),
        rank=ranks.rank,
    )


def _path(share: Share, item: Item) -> Path:
    return share.target / item.split / item.name


def _fill(
    experiment: Experiment, share: Share, ranks: Ranks, received: Received, verify: bool
) -> tuple[int, float]:
    """Bring the node's directory to what it is to hold: this rank's bytes copied, and seconds."""

    def heed() -> None:
        """End on all ranks if a signal came to one."""
        names = [name for name in ranks.collect(received()) if name]
        if names:
            raise Interrupted(
                f"stage: stopped by {names[0]}; what is copied stays: the same command goes on"
            )

    with claims.alone(share.target, ranks, heed):
        with ranks.together("removing what a killed job left"):
            if ranks.local_rank == 0:  # nobody else is writing
                for split in SPLITS:
                    copying.remove_unfinished(share.target / split)
        with ranks.together("looking at what is staged"):
            lanes = _my_lanes(experiment, share, ranks)
            missing = _missing(share, lanes, received, verify)
        heed()
        wanted = sum(item.bytes for lane in missing for item in lane)
        _check_space(experiment, share, wanted, ranks)
        begun = time.perf_counter()
        if experiment.stage.broadcast and share.nodes > 1:
            _broadcast(experiment, share, missing, ranks, received)
            heed()
            missing = _missing(share, missing, received, verify=False)
        with ranks.together("staging"):
            _copy(experiment, share, missing, ranks, received)
        seconds = time.perf_counter() - begun
        heed()
        with ranks.together("writing the deal"):
            if ranks.local_rank == 0:
                _write_deal(share)
    return wanted, seconds


def _my_lanes(experiment: Experiment, share: Share, ranks: Ranks) -> Lanes:
    """The files that this rank sees to; the node's streams are dealt to its ranks."""
    lanes = deal.lanes([item.bytes for item in share.items], experiment.stage.streams)
    return [
        [share.items[place] for place in lane]
        for lane in lanes[ranks.local_rank :: ranks.local_size]
    ]


def _missing(share: Share, lanes: Lanes, received: Received, verify: bool) -> Lanes:
    """The files that have no right copy yet; the lanes are looked through at the same time."""

    def look(lane: list[Item]) -> list[Item]:
        found = []
        for item in lane:
            if received():
                break
            if not copying.is_staged(item, _path(share, item), read=verify):
                found.append(item)
        return found

    with ThreadPoolExecutor(max(1, len(lanes))) as pool:
        return list(pool.map(look, lanes))


def _broadcast(
    experiment: Experiment, share: Share, missing: Lanes, ranks: Ranks, received: Received
) -> None:
    """Send what every node holds from one reader to all."""
    broadcasting.broadcast(
        [item for lane in missing for item in lane if item.split != DEALT],
        experiment.data.dir,
        share.target,
        experiment.stage.block << 20,
        ranks,
        stopping=lambda: received() is not None,
    )


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


def _copy(
    experiment: Experiment, share: Share, lanes: Lanes, ranks: Ranks, received: Received
) -> None:
    """Copy each lane in a thread of its own. The first failure ends all, and so does a signal."""
    ended = False
    bar = progress(None, "stage", total=sum(map(len, lanes)), unit="shard", rank=ranks.rank)

    def between() -> None:
        if ended or received():
            raise Interrupted

    def run(lane: list[Item]) -> None:
        for item in lane:
            between()
            source, block = experiment.data.dir / item.split / item.name, experiment.stage.block
            copying.copy(item, source, _path(share, item), block << 20, between)
            bar.update()

    with bar, ThreadPoolExecutor(max(1, len(lanes))) as pool:
        copies = [pool.submit(run, lane) for lane in lanes]
        try:
            wait(copies, return_when=FIRST_EXCEPTION)
        finally:
            ended = True
    for each in copies:
        with suppress(Interrupted):
            each.result()


def _write_deal(share: Share) -> None:
    content = {
        "node": share.node,
        "nodes": share.nodes,
        "parts": [DEALT] if share.nodes > 1 else [],
        "splits": share.rows,
    }
    files.write_json(share.target / shards.DEAL_NAME, shards.DEAL, content)


def _remove(target: Path) -> int:
    """Remove the copies in a node's directory, and the directory if nothing else is in it.

    Returns:
        Bytes that are free now.
    """
    try:
        (target / shards.DEAL_NAME).unlink(missing_ok=True)  # first: what is left is not whole
        freed = sum(copying.remove_copies(target / split) for split in SPLITS)
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be removed ({error.strerror})") from error
    for directory in (*(target / split for split in SPLITS), target):
        with suppress(OSError):  # holds files of others, or is not there
            directory.rmdir()
    return freed
