"""Which samples make a batch, and what augmentation does to each: functions of (seed, step) alone.

Nothing is remembered from batch to batch, so that a run can be entered at any step. Two ranks with
batch B draw the same global batches as one rank with batch 2 B.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from stemdl.errors import UserError


@dataclass(frozen=True)
class Draw:
    """The samples of a batch, and what augmentation does to each."""

    index: np.ndarray  # (B,) int32
    weight: np.ndarray  # (B,) float32
    turns: np.ndarray | None = None  # (B,) operations of `symmetry`
    levels: np.ndarray | None = None  # (B,) float32 of noise; None: none
    noise_seed: int = 0


def steps_per_epoch(count: int, batch: int, size: int) -> int:
    """Whole steps that `size` ranks take over `count` samples; the rest waits for other epochs.

    Raises:
        UserError: not even one.
    """
    steps = count // (batch * size)
    if steps == 0:
        raise UserError(
            f"{count} training samples are fewer than one step takes: {size} ranks x "
            f"train.batch={batch} = {size * batch}; lower train.batch or start fewer ranks"
        )
    return steps


def training_order(count: int, batch: int, size: int, *, seed: int, epoch: int) -> np.ndarray:
    """Samples (steps, ranks, batch) of an epoch: one permutation of all, cut in steps, then ranks.

    Raises:
        UserError: too few samples for a step.
    """
    steps = steps_per_epoch(count, batch, size)
    order = _random(seed, epoch, "order").permutation(count)
    return order[: steps * size * batch].reshape(steps, size, batch).astype(np.int32)


def training_draws(
    count: int,
    batch: int,
    rank: int,
    size: int,
    *,
    seed: int,
    steps_per_epoch: int,
    operations: int,
    noise: float,
) -> Callable[[int], Draw]:
    """A function from global steps to what rank `rank` of `size` trains on.

    Args:
        operations: symmetries to choose from; 1: none.
        noise: largest level of noise.
    """
    weight = np.ones(batch, np.float32)

    @lru_cache(2)  # where one epoch ends and the next begins, batches of both are in the making
    def of_epoch(epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        order = training_order(count, batch, size, seed=seed, epoch=epoch)[:, rank]
        # Number i of each draw belongs to sample i.
        random = _random(seed, epoch, "augmentation")
        turns = random.integers(operations, size=count)
        levels = random.uniform(0, noise, count).astype(np.float32)
        return order, turns, levels, int(random.integers(2**31))

    def draw(step: int) -> Draw:
        epoch, step_in_epoch = divmod(step, steps_per_epoch)
        order, turns, levels, noise_seed = of_epoch(epoch)
        index = order[step_in_epoch]
        return Draw(index, weight, turns[index], levels[index] if noise else None, noise_seed)

    return draw


def evaluation_order(
    count: int, batch: int, rank: int, size: int, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Samples and weights (steps, batch) of a rank: its run of `count`, filled up at weight 0."""
    mine = np.arange(count * rank // size, count * (rank + 1) // size)
    index = np.zeros(steps * batch, np.int32)
    index[: len(mine)] = mine
    weight = (np.arange(steps * batch) < len(mine)).astype(np.float32)
    return index.reshape(steps, batch), weight.reshape(steps, batch)


def _random(seed: int, epoch: int, purpose: str) -> np.random.Generator:
    """A stream of random numbers of its own for each purpose in each epoch."""
    entropy = [seed, epoch, zlib.crc32(purpose.encode())]
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))
