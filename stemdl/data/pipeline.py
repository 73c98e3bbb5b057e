"""Shards -> tensors: reading, decoding, normalising and augmenting while the network trains.

    batches = training(split, normaliser, experiment.data, batch=8, seed=0, ranks=ranks,
                       steps_per_epoch=100, steps=range(250, 2000))
    for batch in batches:
        batch["cbed"], batch["potential"]         # float32, normalised

A batch is a function of (seed, step) (see `order`), with the same bits whatever the number of
reader threads. One pipeline serves all steps: nothing is built anew between epochs.

`data.readers` threads each read and prepare a batch at a time and `data.prefetch` batches wait
ready: a rank holds at most readers + prefetch + 1 batches, whatever the size of the data set, and
one more within `ahead`. A GPU is sent the samples as they are stored, which are fewer bytes than
float32, and normalises them itself.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

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
    """Batches, from the first one on as often as they are iterated over."""

    dataset: tf.data.Dataset
    finish: Callable[[Batch], Batch] | None = None  # on the GPU

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.dataset) if self.finish is None else map(self.finish, self.dataset)

    def __len__(self) -> int:
        return len(self.dataset)


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
    return _batches(
        split,
        normaliser,
        settings,
        batch,
        len(steps),
        lambda number: draw(steps[number]),
        noisy=settings.noise > 0,
    )


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
        split, normaliser, settings, batch, steps, lambda step: Draw(index[step], weight[step])
    )


def ahead(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The same batches; each is asked for while the one before is in use."""
    waiting = iter(batches)
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, waiting, None)
        while (batch := coming.result()) is not None:
            coming = pool.submit(next, waiting, None)
            yield batch


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn what TensorFlow makes of a reader's UserError back into the UserError.

    Wrap the iteration over batches in it.
    """
    try:
        yield
    except tf.errors.OpError as error:
        found = re.search(r"UserError: (.*)", error.message)
        if found is None:
            raise
        raise UserError(found[1]) from error


def _batches(
    split: shards.Split,
    normaliser: Normaliser,
    settings: schema.Data,
    batch: int,
    count: int,
    draw: Callable[[int], Draw],
    *,
    noisy: bool = False,
) -> Batches:
    """The batches that `draw` describes for the numbers 0 to `count` - 1: read and prepared."""
    detector = split.cbed_shape[2:]
    if normaliser.cbed_mean.shape not in ((), detector):
        raise UserError(
            f"{split.directory / split.name}: detector is {detector}, wanted "
            f"{normaliser.cbed_mean.shape} as in the run's normalisation"
        )
    read, kinds = reading.reader(split), reading.kinds(split)
    fields = {name: ((batch, *shape), dtype) for name, (shape, dtype) in kinds.items()}
    fields |= {"index": ((batch,), np.dtype("int32")), "weight": ((batch,), np.dtype("float32"))}
    if noisy:
        fields |= {"levels": ((batch,), np.dtype("float32")), "noise_seed": ((), np.dtype("int32"))}

    def fetch(number: np.int64) -> list[np.ndarray | np.int32 | None]:
        drawn = draw(int(number))
        found = {**read(drawn.index, drawn.turns), "index": drawn.index, "weight": drawn.weight}
        noise = {"levels": drawn.levels, "noise_seed": np.int32(drawn.noise_seed)}
        return [(found | noise)[name] for name in fields]

    @tf.autograph.experimental.do_not_convert
    def stored(number: tf.Tensor) -> Batch:
        dtypes = [dtype for _, dtype in fields.values()]
        arrays = tf.numpy_function(fetch, [number], dtypes, stateful=False)
        return {
            name: tf.ensure_shape(array, shape)
            for (name, (shape, _)), array in zip(fields.items(), arrays, strict=True)
        }

    gpu = _gpu()
    normalised = _normalised(normaliser, compiled=gpu is None)

    @tf.autograph.experimental.do_not_convert
    def ready(given: Batch) -> Batch:
        found = given | normalised({name: given[name] for name in kinds})
        if noisy:
            level, seed = found.pop("levels"), found.pop("noise_seed")
            found["cbed"] = _with_noise(found["cbed"], level, seed, given["index"])
        return found

    options = tf.data.Options()
    options.autotune.enabled = False  # memory stays what the settings say
    options.threading.private_threadpool_size = settings.readers
    options.threading.max_intra_op_parallelism = 1
    dataset = tf.data.Dataset.range(count).with_options(options)
    threads = {"num_parallel_calls": settings.readers, "deterministic": True}
    if gpu is None:
        dataset = dataset.map(lambda number: ready(stored(number)), **threads)
        return Batches(dataset.prefetch(settings.prefetch))
    send = tf.data.experimental.prefetch_to_device(gpu, settings.prefetch)
    return Batches(dataset.map(stored, **threads).apply(send), tf.function(ready, autograph=False))


def _normalised(normaliser: Normaliser, *, compiled: bool) -> Callable[[Batch], Batch]:
    """Stored patterns and potentials to normalised ones.

    Compiled for the CPU: one pass over memory instead of one for each operation.
    """

    # Each pattern as one row: long rows make long vector loops.
    rows = replace(
        normaliser, cbed_mean=normaliser.cbed_mean.ravel(), cbed_std=normaliser.cbed_std.ravel()
    )

    def normalised(stored: Batch) -> Batch:
        cbed = stored["cbed"]
        patterns = tf.reshape(cbed, (-1, cbed.shape[-2] * cbed.shape[-1]))
        found = {"cbed": tf.reshape(rows.cbed(patterns), cbed.shape)}
        if "potential" in stored:
            found["potential"] = normaliser.potential(stored["potential"])
        return found

    if compiled:
        _start_xla()
    return tf.function(normalised, jit_compile=compiled, autograph=False)


def _gpu() -> str | None:
    """The GPU of this rank, if it has one."""
    return "/GPU:0" if tf.config.list_logical_devices("GPU") else None


@cache
def _start_xla() -> None:
    """Start XLA, which tells of itself on stderr in five lines a rank that no setting silences."""
    stderr = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        tf.function(lambda: tf.zeros(()) + 1, jit_compile=True)()
    finally:
        os.dup2(stderr, 2)
        os.close(nowhere)
        os.close(stderr)


def _with_noise(cbed: tf.Tensor, level: tf.Tensor, seed: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
    """(1 - a) x + a u for each sample, u uniform with the mean and deviation of x: 0 and 1."""
    shape, width = cbed.shape[1:], 3**0.5
    draws = [
        tf.random.stateless_uniform(shape, [seed, sample], -width, width, alg="philox")
        for sample in tf.unstack(index)
    ]
    a = tf.reshape(level, (-1, 1, 1, 1, 1))
    return (1 - a) * cbed + a * tf.stack(draws)
