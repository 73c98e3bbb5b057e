"""Who gets which samples: pure arithmetic, the same on every rank."""

import heapq
from collections.abc import Sequence

import numpy as np

Part = list[tuple[int, int, int]]  # (shard, first row, last row + 1)


def samples(counts: Sequence[int], shares: Sequence[int]) -> list[Part]:
    """Deal the samples of shards in proportion to `shares`, each sample once.

    A part is a run of consecutive samples, so it touches few shards; a shard on the border of two
    parts is in both, with different rows. Sizes are within one sample of the proportion.

    Args:
        counts: samples in each shard.
        shares: weight of each part, such as the ranks of each node.
    """
    starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    weights = np.concatenate([[0], np.cumsum(shares, dtype=np.int64)])
    borders = starts[-1] * weights // weights[-1]
    lows, highs = borders[:-1], borders[1:]
    firsts = np.searchsorted(starts, lows, side="right") - 1
    lasts = np.searchsorted(starts, highs, side="left")
    return [
        [
            (
                shard,
                int(max(low - starts[shard], 0)),
                int(min(high, starts[shard + 1]) - starts[shard]),
            )
            for shard in range(first, last)
            if counts[shard] and low < high
        ]
        for low, high, first, last in zip(lows, highs, firsts, lasts, strict=True)
    ]


def lanes(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Deal files to `count` lanes of about equal bytes: largest first, to the emptiest lane."""
    dealt: list[list[int]] = [[] for _ in range(count)]
    load = [(0, lane) for lane in range(count)]
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        total, lane = heapq.heappop(load)
        dealt[lane].append(item)
        heapq.heappush(load, (total + sizes[item], lane))
    return dealt


def nodes(places: Sequence[tuple[str, int]]) -> list[int]:
    """The node of each rank, from every rank's (host name, local rank), in rank order.

    Local rank 0 opens a node; the others join the first node of their host that lacks them. This
    holds for ranks placed node by node or in turns, and where hosts share a name (containers).
    """
    found: list[tuple[str, set[int]]] = []
    result = []
    for host, local_rank in places:
        node = next(
            (
                number
                for number, (name, members) in enumerate(found)
                if name == host and local_rank not in members
            ),
            None,
        )
        if local_rank == 0 or node is None:
            node = len(found)
            found.append((host, set()))
        found[node][1].add(local_rank)
        result.append(node)
    return result
