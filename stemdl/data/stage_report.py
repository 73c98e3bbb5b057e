"""How staging went: RUN/stage.json and one line."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stemdl import files, filesystems
from stemdl.console import say
from stemdl.ranks import Ranks

SCHEMA = "stemdl.stage/1"


@dataclass(frozen=True)
class Done:
    """What one rank did."""

    node: int
    host: str
    directory: Path  # the node's
    holds: int  # [bytes] that its node needs
    copied: int  # [bytes] by this rank
    seconds: float  # that its copies took
    warnings: list[str]


def publish(path: Path, mine: Done, ranks: Ranks, wall: float) -> None:
    """Gather what every rank did; rank 0 writes the report to `path` and prints one line.

    `wall` is the time from the start of staging [s], looking at the source included.
    """
    everyone = ranks.collect(mine)
    content = summary(everyone, wall)
    with ranks.together(f"writing {path}"):
        if ranks.rank == 0:
            files.write_json(path, SCHEMA, content)
    for warning in content["warnings"]:
        say(f"stage: warning: {warning}", rank=ranks.rank)
    nodes = content["nodes"]
    say(
        f"stage: {content['GB']:.3g} GB on {len(nodes)} node{'s' if len(nodes) > 1 else ''}, "
        f"{content['copied_GB']:.3g} GB of it copied and verified now, in {wall:.1f} s "
        f"({content['GB_per_s']:.2f} GB/s, slowest rank {content['slowest_rank']}): "
        f"{mine.directory}",
        rank=ranks.rank,
    )


def summary(everyone: list[Done], wall: float) -> dict[str, Any]:
    """The report's content; `everyone` in rank order. Rates are over the slowest rank's time."""
    nodes: list[dict[str, Any]] = []
    for node in sorted({done.node for done in everyone}):
        members = {rank: done for rank, done in enumerate(everyone) if done.node == node}
        first = next(iter(members.values()))
        slowest = max(members, key=lambda rank: members[rank].seconds)
        copied = sum(done.copied for done in members.values()) / 1e9
        nodes.append(
            {
                "host": first.host,
                "directory": str(first.directory),
                "GB": first.holds / 1e9,
                "copied_GB": copied,
                "seconds": members[slowest].seconds,
                "GB_per_s": _rate(copied, members[slowest].seconds),
                "slowest_rank": slowest,
            }
        )
    total = sum(node["copied_GB"] for node in nodes)
    last = max(nodes, key=lambda node: node["seconds"])
    return {
        "GB": sum(node["GB"] for node in nodes),
        "copied_GB": total,
        "wall_seconds": wall,
        "GB_per_s": _rate(total, last["seconds"]),
        "slowest_rank": last["slowest_rank"],
        "nodes": nodes,
        "warnings": sorted({warning for done in everyone for warning in done.warnings}),
    }


def warnings(source: Path, target: Path) -> list[str]:
    """Reasons why reading from `target` may be no better than from `source`."""
    kind = filesystems.kind(target)
    found = []
    if kind in filesystems.IN_MEMORY:
        found.append(
            f"{target} lives in memory ({kind}), not on a disk; set stage.dir to the node's disk"
        )
    if filesystems.is_shared(kind):
        found.append(
            f"{target} is on a shared file system ({kind}); set stage.dir to the node's disk"
        )
    if source.stat().st_dev == target.stat().st_dev:
        found.append(
            f"{target} is on the same file system as {source}, so staging gains little; set "
            "stage.dir to the node's disk, or to null"
        )
    return found


def _rate(gigabytes: float, seconds: float) -> float:
    return gigabytes / seconds if gigabytes else 0.0
