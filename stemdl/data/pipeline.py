"""Shards -> tensors: reading, decoding, normalising and augmenting while the network trains.

    batches = training(split, normaliser, experiment.data, batch=8, seed=0, ranks=ranks, epoch=3)
    for batch in batches:
        batch["cbed"], batch["potential"]         # float32, normalised

A batch is a function of (seed, epoch, step): nothing else is remembered, so that any position of a
run can be entered at once, with the same bits, whatever the number of reader threads. Two ranks
with batch B see the same global batches as one rank with batch 2 B.

`data.readers` threads each read and prepare a batch at a time and `data.prefetch` batches wait
ready: a rank holds at most readers + prefetch + 1 batches, whatever the size of the data set.
"""

import os
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import tensorflow as tf

from stemdl import schema
from stemdl.data import shards, symmetry
from stemdl.data.normalise import Normaliser, check_finite
from stemdl.errors import UserError
from stemdl.ranks import Ranks

OPEN_FILES = 128  # shards held open by one data set

Sample = dict[str, np.ndarray]


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


def training(
    split: shards.Split,
    normaliser: Normaliser,
    settings: schema.Data,
    *,
    batch: int,
    seed: int,
    ranks: Ranks,
    epoch: int,
    start_step: int = 0,
) -> tf.data.Dataset:
    """This rank's batches of an epoch from `start_step` on, shuffled and augmented.

    Elements: "cbed" (B, Sy, Sx, Ky, Kx) and "potential" (B, H, W) float32 normalised, "index"
    (B,) int32 of the sample in the split, "weight" (B,) float32, all 1.

    Raises:
        UserError: too few samples, or statistics of another detector.
    """
    rank, size = split.place(ranks)
    plan = training_order(split.count, batch, size, seed=seed, epoch=epoch)[start_step:, rank]
    # Number i of each draw belongs to sample i.
    random = _random(seed, epoch, "augmentation")
    operations = random.integers(
        symmetry.order(split.cbed_shape, split.potential_shape or ()), size=split.count
    )
    levels = random.uniform(0, settings.noise, split.count).astype(np.float32)
    noise_seed = int(random.integers(2**31))
    read = _reader(split, operations if settings.symmetry else None)

    def augment(cbed: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
        if settings.noise == 0:
            return cbed
        return _noisy(cbed, tf.gather(levels, index), noise_seed, index)

    return _dataset(split, normaliser, settings, plan, np.ones(plan.shape), read, augment)


def evaluation(
    split: shards.Split,
    normaliser: Normaliser,
    settings: schema.Data,
    *,
    batch: int,
    ranks: Ranks,
) -> tf.data.Dataset:
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
    plan, weight = evaluation_order(split.count, batch, rank, size, steps)
    return _dataset(split, normaliser, settings, plan, weight, _reader(split), lambda cbed, _: cbed)


def training_order(count: int, batch: int, size: int, *, seed: int, epoch: int) -> np.ndarray:
    """Samples (steps, ranks, batch) of an epoch: one permutation of all, cut in steps, then ranks.

    Raises:
        UserError: too few samples for a step.
    """
    steps = steps_per_epoch(count, batch, size)
    order = _random(seed, epoch, "order").permutation(count)
    return order[: steps * size * batch].reshape(steps, size, batch).astype(np.int32)


def evaluation_order(
    count: int, batch: int, rank: int, size: int, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Samples and weights (steps, batch) of a rank: its run of `count`, filled up at weight 0."""
    mine = np.arange(count * rank // size, count * (rank + 1) // size)
    index = np.zeros(steps * batch, np.int32)
    index[: len(mine)] = mine
    weight = np.arange(steps * batch) < len(mine)
    return index.reshape(steps, batch), weight.reshape(steps, batch)


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn what TensorFlow makes of a reader's UserError back into the UserError.

    Wrap the iteration over a data set in it.
    """
    try:
        yield
    except tf.errors.OpError as error:
        found = re.search(r"UserError: (.*)", error.message)
        if found is None:
            raise
        raise UserError(found[1]) from error


def _dataset(
    split: shards.Split,
    normaliser: Normaliser,
    settings: schema.Data,
    plan: np.ndarray,
    weights: np.ndarray,
    read: Callable[[np.ndarray], Sample],
    augment: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
) -> tf.data.Dataset:
    """Batches of the samples that `plan` (steps, B) names: read, prepared and augmented."""
    steps, batch = plan.shape
    weights = weights.astype(np.float32)
    detector = split.cbed_shape[2:]
    if normaliser.cbed_mean.shape not in ((), detector):
        raise UserError(
            f"{split.directory / split.name}: detector is {detector}, wanted "
            f"{normaliser.cbed_mean.shape} as in the run's normalisation"
        )
    shapes: dict[str, tuple[int, ...]] = {"cbed": (batch, *split.cbed_shape)}
    dtypes = {"cbed": split.shards[0].cbed_dtype}
    if split.potential_shape is not None:
        shapes["potential"] = (batch, *split.potential_shape)
        dtypes["potential"] = split.shards[0].potential_dtype

    def fetch(step: np.int64) -> list[np.ndarray]:
        return list(read(plan[step]).values())

    _start_xla()

    # Compiled: one pass over memory instead of one for each operation.
    @tf.function(jit_compile=True, autograph=False)
    def prepare(stored: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        ready = {"cbed": normaliser.cbed(stored["cbed"])}
        if "potential" in stored:
            ready["potential"] = normaliser.potential(stored["potential"])
        return ready

    @tf.autograph.experimental.do_not_convert
    def element(step: tf.Tensor) -> dict[str, tf.Tensor]:
        arrays = tf.numpy_function(fetch, [step], list(dtypes.values()), stateful=False)
        stored = {
            name: tf.ensure_shape(array, shapes[name])
            for name, array in zip(shapes, arrays, strict=True)
        }
        index, weight = tf.gather(plan, step), tf.gather(weights, step)
        ready = prepare(stored)
        return {**ready, "cbed": augment(ready["cbed"], index), "index": index, "weight": weight}

    dataset = tf.data.Dataset.range(steps)
    dataset = dataset.map(element, num_parallel_calls=settings.readers, deterministic=True)
    options = tf.data.Options()
    options.autotune.enabled = False  # memory stays what the settings say
    options.threading.private_threadpool_size = settings.readers
    options.threading.max_intra_op_parallelism = 1
    return dataset.prefetch(settings.prefetch).with_options(options)


def _random(seed: int, epoch: int, purpose: str) -> np.random.Generator:
    """A stream of random numbers of its own for each purpose in each epoch."""
    entropy = [seed, epoch, zlib.crc32(purpose.encode())]
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))


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


def _noisy(cbed: tf.Tensor, level: tf.Tensor, seed: int, index: tf.Tensor) -> tf.Tensor:
    """(1 - a) x + a u for each sample, u uniform with the mean and deviation of x: 0 and 1."""
    shape, width = cbed.shape[1:], 3**0.5
    draws = [
        tf.random.stateless_uniform(shape, [seed, sample], -width, width, alg="philox")
        for sample in tf.unstack(index)
    ]
    a = tf.reshape(level, (-1, 1, 1, 1, 1))
    return (1 - a) * cbed + a * tf.stack(draws)


def _reader(
    split: shards.Split, operations: np.ndarray | None = None
) -> Callable[[np.ndarray], Sample]:
    """A function from sample indices to their arrays as stored, stacked.

    `operations`: for each sample of the split, the symmetry to apply.
    """
    descriptor = lru_cache(OPEN_FILES)(_Descriptor)
    first = split.shards[0]
    kinds: dict[str, tuple[tuple[int, ...], np.dtype]] = {
        "cbed": (first.cbed_shape, first.cbed_dtype)
    }
    if first.potential_shape is not None:
        kinds["potential"] = (first.potential_shape, first.potential_dtype)

    def read(index: np.ndarray) -> Sample:
        out = {
            name: _aligned((len(index), *shape), dtype) for name, (shape, dtype) in kinds.items()
        }
        for place, (shard, row) in enumerate(shards.locate_all(split, index)):
            target = {name: array[place] for name, array in out.items()}
            turn = 0 if operations is None else int(operations[index[place]])
            # A sample that is to be turned is read apart and copied once, turned.
            stored = {k: np.empty_like(v) for k, v in target.items()} if turn else target
            _read_sample(shard, row, stored, descriptor)
            check_finite(shard, row, stored)
            if turn:
                for name, array in stored.items():
                    target[name][...] = symmetry.apply(turn, array)
        return out

    return read


def _read_sample(
    shard: shards.Shard, row: int, out: Sample, descriptor: "Callable[[Path], _Descriptor]"
) -> None:
    """Fill `out` with one sample, by its byte ranges where the shard is contiguous."""
    begins = {"cbed": shard.cbed_offset, "potential": shard.potential_offset}
    offsets = {name: begin for name, begin in begins.items() if begin is not None}
    if not out.keys() <= offsets.keys():
        for name, array in shards.read_samples(shard, [row]).items():
            out[name][...] = array[0]
        return
    file = descriptor(shard.path)  # held, so that it stays open while it is read
    for name, array in out.items():
        file.fill(array, offsets[name] + (shard.first + row) * array.nbytes)


class _Descriptor:
    """A file open for reading, closed when the last reader lets go of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from error

    def fill(self, array: np.ndarray, offset: int) -> None:
        """Fill `array` with the file's bytes from `offset` on."""
        view = memoryview(array.data).cast("B")
        while view:
            try:
                count = os.preadv(self.number, [view], offset)
            except OSError as error:
                raise UserError(f"{self.path}: cannot be read ({error.strerror})") from error
            if count == 0:
                raise UserError(f"{self.path}: ends at byte {offset}; make or copy it again")
            view, offset = view[count:], offset + count

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An empty array on a 64-byte boundary, which TensorFlow takes over without a copy."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)
