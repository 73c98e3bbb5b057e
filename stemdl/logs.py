"""What 27,600 ranks have to say, in lines that a person can read.

Rank 0 speaks on the console (`stemdl.console`). Warnings of the others are collected and told by
rank 0 from time to time, one line for all ranks that say the same:

    warning: 312 ranks (first: rank 17 on h04n02): data/train/00012.h5 read slowly

With STEMDL_NODE_LOGS=DIR in the environment (`stemdl launch --node-logs`) each rank also appends
its own records to DIR/NODE.log.
"""

import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stemdl import ranks as ranks_module
from stemdl.console import say
from stemdl.ranks import Ranks

MOST = 100  # different warnings that a rank keeps between two tellings


class Warnings(logging.Handler):
    """Collects this rank's warnings until `tell`."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(logging.WARNING)
        self._ranks = ranks
        self._said: dict[str, None] = {}  # in the order of their first time

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._said) < MOST:
            self._said[" ".join(record.getMessage().split())] = None

    def tell(self) -> None:
        """Rank 0 says what all ranks collected since the last time (a collective)."""
        mine, self._said = list(self._said), {}
        if not any(self._ranks.collect(bool(mine))):
            return
        said = self._ranks.collect((ranks_module.host(), mine))
        for line in aggregate(
            (rank, host, text) for rank, (host, texts) in enumerate(said) for text in texts
        ):
            say(f"warning: {line}", rank=self._ranks.rank)


@contextmanager
def listening(ranks: Ranks) -> Iterator[Warnings]:
    """Collect what libraries and stemdl warn of, for the length of the block."""
    root, handlers = logging.getLogger(), [warnings := Warnings(ranks), *_node_log(ranks)]
    logging.captureWarnings(True)
    for handler in handlers:
        root.addHandler(handler)
    try:
        yield warnings
    finally:
        if ranks.comm is None:  # among ranks a failed one could not take part
            warnings.tell()
        logging.captureWarnings(False)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()


def aggregate(said: Iterable[tuple[int, str, str]]) -> list[str]:
    """One line for what ranks say alike; texts that differ in numbers alone are alike.

    Args:
        said: rank, host and text, in rank order.
    """
    groups: dict[str, list[tuple[int, str, str]]] = {}
    for each in said:
        groups.setdefault(re.sub(r"\d+", "#", each[2]), []).append(each)
    lines = []
    for group in groups.values():
        rank, host, text = group[0]
        count = len({rank for rank, _, _ in group})
        lines.append(
            f"rank {rank} on {host}: {text}"
            if count == 1
            else f"{count} ranks (first: rank {rank} on {host}): {text}"
        )
    return lines


def _node_log(ranks: Ranks) -> list[logging.Handler]:
    directory = os.environ.get("STEMDL_NODE_LOGS")
    if not directory:
        return []
    path = Path(directory) / f"{ranks_module.host()}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    form = f"%(asctime)s rank {ranks.rank} %(levelname)s %(name)s: %(message)s"
    handler.setFormatter(logging.Formatter(form))
    return [handler]
