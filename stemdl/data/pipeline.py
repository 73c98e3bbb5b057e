"""Shards -> tensors: reading, decoding, normalising and augmenting while the network trains.

    batches = training(split, normaliser, experiment.data, batch=8, seed=0, ranks=ranks,
                       steps_per_epoch=100, steps=range(250, 2000))
    for batch in batches:
        batch["cbed"], batch["potential"]         # float32, normalised

A batch is a function of (seed, step) (see `order`), with the same bits whatever the number of
reader threads. One pipeline serves all steps: nothing is built anew between epochs.

`data.readers` threads each read and prepare a batch at a time and `data.prefetch` batches wait
ready: a rank holds at most readers + prefetch + 1 batches, whatever the size of the data set. A GPU
is sent the samples as they are stored, which are fewer bytes than float32, and normalises them
itself; they wait there.

Plain threads do this on CPUs faster than tf.data: reading and decoding let go of Python's lock.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
import tensorflow as tf

from stemdl import schema
from stemdl.data import order, reading, shards, symmetry
from stemdl.data.normalise import Normaliser
from stemdl.data.order import Draw
from stemdl.errors import UserError
from stemdl.ranks import Ranks

Batch = dict[str, tf.Tensor]


@dataclass(frozen=True)
class Batches:
    """The batches make(0) to make(count - 1), from the first one on as often as one iterates."""

    make: Callable[[int], Batch]
    count: int
    readers: int
    prefetch: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Batch]:
        """In order; the next readers + prefetch ones are in the making or wait meanwhile."""
        with ThreadPoolExecutor(self.readers, thread_name_prefix="reader") as pool:
            numbers = iter(range(self.count))
            coming = deque(
                pool.submit(self.make, number)
                for number in islice(numbers, self.readers + self.prefetch)
            )
            try:
                while coming:
                    yield coming.popleft().result()
                    coming.extend(pool.submit(self.make, number) for number in islice(numbers, 1))
            finally:
                pool.shutdown(cancel_futures=True)


def training(
    split: shards.Split,
    normaliser: Normaliser,
    settings: schema.Data,
    *,
    batch: int,
    seed: int,
    ranks: Ranks,
    steps_per_epoch: int,
    steps: range,
) -> Batches:
    """This rank's batches of the global `steps`, shuffled anew in each epoch, and augmented.

    Elements: "cbed" (B, Sy, Sx, Ky, Kx) and "potential" (B, H, W) float32 normalised, "index"
    (B,) int32 of the sample in the split, "weight" (B,) float32, all 1.

    Args:
        steps_per_epoch: at most what `order.steps_per_epoch` says of the split.
        steps: global steps; step s is step s % steps_per_epoch of epoch s // steps_per_epoch.

    Raises:
        UserError: statistics of another detector.
    """
    rank, size = split.place(ranks)
    operations = symmetry.order(split.cbed_shape, split.potential_shape or ())
    draw = order.training_draws(
        split.count,
        batch,
        rank,
        size,
        seed=seed,
        steps_per_epoch=steps_per_epoch,
        operations=operations if settings.symmetry else 1,
        noise=settings.noise,
    )
    return _batches(split, normaliser, settings, len(steps), lambda number: draw(steps[number]))


def evaluation(
    split: shards.Split,
    normaliser: Normaliser,
    settings: schema.Data,
    *,
    batch: int,
    ranks: Ranks,
) -> Batches:
    """This rank's batches of a split: every sample once over all ranks, in order, as it is.

    Elements as in `training`; "potential" only if the split has it. All ranks get the same number
    of batches: the last ones are filled up with sample 0 at weight 0.

    Raises:
        UserError: statistics of another detector.
    """
    rank, size = split.place(ranks)
    steps = -(-split.count // (size * batch))
    if split.node_part:  # other nodes may have one more
        steps = max(ranks.collect(steps))
    index, weight = order.evaluation_order(split.count, batch, rank, size, steps)
    return _batches(
        split, normaliser, settings, steps, lambda step: Draw(index[step], weight[step])
    )


def tensor(array: np.ndarray) -> tf.Tensor:
    """A tensor that takes over the memory of an array, copied only if it is not aligned."""
    if array.ctypes.data % reading.ALIGNMENT:
        array, given = reading.aligned(array.shape, array.dtype), array
        array[...] = given
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def _batches(
    split: shards.Split,
    normaliser: Normaliser,
    settings: schema.Data,
    count: int,
    draw: Callable[[int], Draw],
) -> Batches:
    """The batches that `draw` describes for the numbers 0 to `count` - 1: read and prepared."""
    detector = split.cbed_shape[2:]
    if normaliser.cbed_mean.shape not in ((), detector):
        raise UserError(
            f"{split.directory / split.name}: detector is {detector}, wanted "
            f"{normaliser.cbed_mean.shape} as in the run's normalisation"
        )
    gpu = _gpu()
    read = reading.reader(split, None if gpu else normaliser)
    normalised = tf.function(partial(_normalised, normaliser), autograph=False)
    noisy = tf.function(_with_noise, autograph=False)

    def make(number: int) -> Batch:
        drawn = draw(number)
        found = read(drawn.index, drawn.turns)
        found |= {"index": drawn.index.copy(), "weight": drawn.weight.copy()}
        batch = {name: tensor(array) for name, array in found.items()}
        with tf.device(gpu):
            if gpu is not None:
                batch = normalised({name: tf.identity(each) for name, each in batch.items()})
            if drawn.levels is not None:
                level, noise_seed = tf.constant(drawn.levels), tf.constant(drawn.noise_seed)
                batch["cbed"] = noisy(batch["cbed"], level, noise_seed, batch["index"])
        return batch

    return Batches(make, count, settings.readers, settings.prefetch)


def _normalised(normaliser: Normaliser, stored: Batch) -> Batch:
    """A batch with patterns and potentials normalised by TensorFlow."""
    found = stored | {"cbed": normaliser.cbed(stored["cbed"])}
    if "potential" in stored:
        found["potential"] = normaliser.potential(stored["potential"])
    return found


def _gpu() -> str | None:
    """The GPU of this rank, if it has one."""
    return "/GPU:0" if tf.config.list_logical_devices("GPU") else None


def _with_noise(cbed: tf.Tensor, level: tf.Tensor, seed: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
    """(1 - a) x + a u for each sample, u uniform with the mean and deviation of x: 0 and 1."""
    shape, width = cbed.shape[1:], 3**0.5
    draws = [
        tf.random.stateless_uniform(shape, [seed, sample], -width, width, alg="philox")
        for sample in tf.unstack(index)
    ]
    a = tf.reshape(level, (-1, 1, 1, 1, 1))
    return (1 - a) * cbed + a * tf.stack(draws)
