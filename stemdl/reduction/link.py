"""What one reduction costs on the ranks at hand, measured with Horovod itself."""

import time
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from scipy.optimize import nnls

from stemdl.ranks import Ranks
from stemdl.reduction import allreduce
from stemdl.reduction.grouping import Link

SIZES = (2**10, 2**16, 2**19, 2**21, 2**23)  # [B], from latency alone to bandwidth alone


def measure(ranks: Ranks, wire: str = "fp32", repeats: int = 10) -> Link:
    """Time a few sizes of grouped allreduce and fit alpha + beta * bytes; the same on all ranks.

    Takes about a second. Horovod must have been started; one rank reduces nothing and pays nothing.
    The first round of each size, in which Horovod negotiates what it then keeps in its cache, is
    left out. A reduction lasts until the last rank has its result.
    """
    if ranks.size == 1:
        return Link(0.0, 0.0)
    seconds = []
    for size in SIZES:
        count = size // allreduce.WIRE[wire].size
        reduce = _reduction(count, size, ranks.size, wire)
        spans = []
        for _ in range(1 + repeats):
            ranks.barrier()
            start = time.perf_counter()
            reduce()
            spans.append(time.perf_counter() - start)
        slowest = np.max(ranks.collect(spans[1:]), axis=0)
        seconds.append(float(np.median(slowest)))
    return fit(SIZES, seconds)


def _reduction(
    count: int, size: int, ranks: int, wire: str
) -> tf.types.experimental.GenericFunction:
    values = tf.zeros(count)

    @tf.function
    def reduce() -> tf.Tensor:
        name = f"link.{size}"
        return allreduce.average([values], [[0]], size=ranks, wire=wire, name=name)[0]

    return reduce


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> Link:
    """The line with the least relative error, neither part negative."""
    weights = 1 / np.array(seconds)
    matrix = np.stack([weights, np.array(sizes) * weights], axis=1)
    scale = matrix.max(axis=0)
    alpha, beta = nnls(matrix / scale, np.ones(len(sizes)))[0] / scale
    return Link(float(alpha), float(beta))
