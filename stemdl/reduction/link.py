"""What one reduction costs on the ranks at hand, measured with Horovod itself."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import tensorflow as tf
from scipy.optimize import nnls

from stemdl.ranks import Ranks
from stemdl.reduction import allreduce
from stemdl.reduction.grouping import Link

SIZES = (2**10, 2**14, 2**17, 2**19, 2**21, 2**23)  # [B], from latency alone to bandwidth alone
CHAIN = 4  # reductions that wait for each other, so that starting together weighs little
TENSORS = 100  # of one number each, sent at once
PATIENCE = 0.5  # longest chain to repeat; larger sizes are left out on slow networks [s]


def measure(ranks: Ranks, wire: str = "fp32", repeats: int = 10, *, gamma: bool = False) -> Link:
    """Time a few sizes of allreduce and fit alpha + beta * bytes; the same on all ranks.

    With `gamma` also what each of many small tensors costs, from sending them at once; no planner
    needs it, a comparison with `none` does. Takes a second or a few. Horovod must have been
    started; one rank reduces nothing and pays nothing. The first round, in which Horovod negotiates
    what it then keeps in its cache, is left out. A reduction lasts until the last rank has its
    result.
    """
    if ranks.size == 1:
        return Link(0.0, 0.0)
    seconds: list[float] = []
    for size in SIZES:
        chain = _chain(size // allreduce.WIRE[wire].size, ranks.size, wire)
        slowest = [_time(chain, ranks) for _ in range(1 + repeats)][1:]
        seconds.append(float(np.median(slowest)) / CHAIN)
        if seconds[-1] * CHAIN > PATIENCE:
            break
    line = fit(SIZES[: len(seconds)], seconds)
    if not gamma:
        return line
    many = _many(ranks.size, wire)
    spans = [_time(many, ranks) for _ in range(1 + repeats)][1:]
    more = max(float(np.median(spans)) - line.alpha, 0.0)
    return replace(line, gamma=more / (TENSORS - 1))


def _time(run: Callable[[], object], ranks: Ranks) -> float:
    """Time until the last rank is through [s]."""
    ranks.barrier()
    start = time.perf_counter()
    run()
    return max(ranks.collect(time.perf_counter() - start))


def _chain(count: int, size: int, wire: str) -> Callable[[], object]:
    """CHAIN reductions of `count` numbers over `size` ranks, one after another."""
    values = tf.zeros(count)

    @tf.function(autograph=False)
    def reduce() -> tf.Tensor:
        result = values
        for turn in range(CHAIN):
            name = f"link.{count}.{turn}"
            (result,) = allreduce.average([result], [[0]], size=size, wire=wire, name=name)
        return result

    return reduce


def _many(size: int, wire: str) -> Callable[[], object]:
    """TENSORS reductions of one number over `size` ranks, ready at the same time."""
    values = [tf.zeros(1) for _ in range(TENSORS)]
    alone = [[place] for place in range(TENSORS)]

    @tf.function(autograph=False)
    def reduce() -> list[tf.Tensor]:
        return allreduce.average(values, alone, size=size, wire=wire, name="link.many")

    return reduce


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> Link:
    """The line with the least relative error, neither part negative."""
    weights = 1 / np.array(seconds)
    matrix = np.stack([weights, np.array(sizes) * weights], axis=1)
    scale = matrix.max(axis=0)
    alpha, beta = nnls(matrix / scale, np.ones(len(sizes)))[0] / scale
    return Link(float(alpha), float(beta))
