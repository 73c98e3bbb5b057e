"""Who gets which samples: pure arithmetic, the same on every rank."""

import heapq
from collections import Counter, defaultdict
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

    Nodes are numbered as they appear. The k-th rank with a host's name and a local rank is on the
    k-th node of that name. This holds for ranks placed node by node or in turns, and where hosts
    share a name (containers).
    """
    seen: Counter[tuple[str, int]] = Counter()
    of_host: defaultdict[str, list[int]] = defaultdict(list)
    count = 0
    result = []
    for host, local_rank in places:
        place = seen[host, local_rank]
        seen[host, local_rank] += 1
        if place == len(of_host[host]):
            of_host[host].append(count)
            count += 1
        result.append(of_host[host][place])
    return result
