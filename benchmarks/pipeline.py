"""The input pipeline against reading the same bytes raw, and against three usual readers.

    python benchmarks/pipeline.py [--dtype float16] [--rounds 3] [--scan 12] [--detector 31]

All give shuffled batches of float32, square-rooted and normalised, from a warm cache, in one
process and in two at once (rates summed, one start). Rates are of bytes as stored:

    raw         os.preadv of the samples' byte ranges into as many batch buffers, in turns, as our
                pipeline holds: a copy and no more, by one thread
    ours        stemdl.data.pipeline.training without augmentation
    undecoded   the same as a GPU gets it: stored dtype, to be normalised there
    generator   tf.data's from_generator over h5py, one open file and one read a sample
    lmdb        from_generator over LMDB, as the published code stored its samples
    tfrecord    TFRecordDataset in parallel, in file order (it cannot shuffle without a buffer)

Ratios: ours / raw (target >= 0.8), undecoded / raw, and ours / generator (target >= 3). `delivered`
counts the bytes of the float32 tensors instead: twice as many as are stored in float16.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
BATCH, WARM_UP = 8, 12  # samples; batches before the clock starts
READERS, PREFETCH = 2, 2
HELD = READERS + PREFETCH + 1  # batches in memory at once
SHARD_BYTES, BYTES = 64e6, 256e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float16", choices=("float16", "float32", "uint16"))
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the best is reported")
    parser.add_argument("--scan", type=int, default=12, help="probe positions an axis")
    parser.add_argument("--detector", type=int, default=31, help="detector pixels an axis")
    parser.add_argument("--dir", type=Path, default=ROOT / "build/benchmarks/pipeline")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    from stemdl import files

    shutil.rmtree(options.dir, ignore_errors=True)
    try:
        make(options)
        result = {f"{count}_processes": run(count) for count in (1, 2)}
    finally:
        shutil.rmtree(options.dir, ignore_errors=True)
    expansion = 4 / np.dtype(options.dtype).itemsize
    for name, rates in result.items():
        line = ", ".join(f"{reader} {rate:.2f}" for reader, rate in rates.items())
        rates["ours_to_raw"] = rates["ours"] / rates["raw"]
        rates["undecoded_to_raw"] = rates["undecoded"] / rates["raw"]
        rates["delivered_to_raw"] = expansion * rates["ours_to_raw"]
        rates["ours_to_generator"] = rates["ours"] / rates["generator"]
        print(
            f"{name}: {line} GB/s; ours / raw {rates['ours_to_raw']:.2f} (target >= 0.8; delivered "
            f"{rates['delivered_to_raw']:.2f}), undecoded / raw {rates['undecoded_to_raw']:.2f}, "
            f"ours / generator {rates['ours_to_generator']:.1f} (target >= 3)"
        )
    path = ROOT / "build/benchmarks/pipeline.json"
    files.write_json(path, "stemdl.benchmark/1", {"dtype": options.dtype} | result)
    print(f"wrote {path}")


def make(options: argparse.Namespace) -> None:
    """The same random samples as shards, TFRecord and LMDB."""
    import lmdb
    import tensorflow as tf

    from stemdl.data import shards

    shape = (options.scan, options.scan, options.detector, options.detector)
    size = int(np.prod(shape)) * np.dtype(options.dtype).itemsize
    count = max(BATCH, round(SHARD_BYTES / size))
    total = max(round(BYTES / size), 2 * WARM_UP * BATCH)
    rng = np.random.default_rng(0)
    environment = lmdb.open(str(options.dir), map_size=8 * total * size, subdir=True)
    number = 0
    for shard in range(-(-total // count)):
        cbed = (rng.random((count, *shape), np.float32) * 100).astype(options.dtype)
        shards.write(
            options.dir / "train" / f"{shard:05d}.h5",
            cbed=cbed,
            potential=rng.random((count, 8, 8), np.float32),
            columns=np.zeros(0, shards.COLUMN),
            samples=np.zeros(count, shards.SAMPLE),
            axes=shards.Axes(1, 0.08, 0.25, 0.3),
            creator="benchmarks/pipeline.py",
        )
        with (
            tf.io.TFRecordWriter(str(options.dir / f"{shard:05d}.tfrecord")) as records,
            environment.begin(write=True) as transaction,
        ):
            for sample in cbed:
                content = tf.train.BytesList(value=[sample.tobytes()])
                features = tf.train.Features(feature={"cbed": tf.train.Feature(bytes_list=content)})
                records.write(tf.train.Example(features=features).SerializeToString())
                transaction.put(f"cbed_{number}".encode(), sample.tobytes())
                number += 1
    environment.close()


def run(processes: int) -> dict[str, float]:
    """Rates [GB/s] of each reader, summed over `processes` that read at the same time."""
    from stemdl.launch import local

    done = subprocess.run(
        [local.mpirun(), "-n", str(processes), sys.executable, *sys.argv, "--worker"],
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=900,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def worker(options: argparse.Namespace) -> None:
    """Time every reader in turns; rank 0 prints the best of each."""
    from stemdl import ranks, schema
    from stemdl.data import normalise, shards

    here = ranks.discover()
    split = shards.open_split(options.dir, "train")
    known = normalise.measure(split, schema.Data(), here)
    readers: dict[str, Callable[[], Iterable]] = {
        "raw": lambda: raw(split),
        "ours": lambda: ours(split, known),
        "undecoded": lambda: undecoded(split, known),
        "generator": lambda: generator(split, known),
        "lmdb": lambda: lmdb_reader(split, known, options.dir),
        "tfrecord": lambda: tfrecord(split, known, options.dir),
    }
    rates: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(options.rounds):
        for name, reader in readers.items():
            here.barrier()
            rates[name].append(sum(here.collect(rate(reader(), split.shards[0].cbed_bytes))))
    if here.rank == 0:
        print(json.dumps({name: max(found) for name, found in rates.items()}))


def rate(batches: Iterable, sample_bytes: int) -> float:
    """Stored gigabytes a second, from the WARM_UPth batch on."""
    count, begun = 0, 0.0
    for count, _ in enumerate(batches):
        if count == WARM_UP:
            begun = time.perf_counter()
    return (count - WARM_UP) * BATCH * sample_bytes / (time.perf_counter() - begun) / 1e9


def samples_of(split) -> Iterator[tuple]:
    """(shard, row) of whole batches of an epoch, shuffled."""
    from stemdl.data import order, shards

    for index in order.training_order(split.count, BATCH, 1, seed=0, epoch=0).flat:
        yield shards.locate(split, index)


def raw(split) -> Iterator[np.ndarray]:
    shape, dtype = split.cbed_shape, split.shards[0].cbed_dtype
    buffers = [np.empty((BATCH, *shape), dtype) for _ in range(HELD)]
    opened = {shard.path: os.open(shard.path, os.O_RDONLY) for shard in split.shards}
    for number, (shard, row) in enumerate(samples_of(split)):
        offset = shard.cbed_offset + row * shard.cbed_bytes
        buffer = buffers[number // BATCH % HELD]
        os.preadv(opened[shard.path], [buffer[number % BATCH]], offset)
        if number % BATCH == BATCH - 1:
            yield buffer
    for descriptor in opened.values():
        os.close(descriptor)


def ours(split, known) -> Iterable:
    from stemdl import ranks, schema
    from stemdl.data import order, pipeline

    settings = schema.Data(symmetry=False, readers=READERS, prefetch=PREFETCH)
    steps = order.steps_per_epoch(split.count, BATCH, 1)
    return pipeline.training(
        split,
        known,
        settings,
        batch=BATCH,
        seed=0,
        ranks=ranks.Ranks(),
        steps_per_epoch=steps,
        steps=range(steps),
    )


def undecoded(split, _known) -> Iterable:
    from stemdl.data import order, pipeline, reading

    index = order.training_order(split.count, BATCH, 1, seed=0, epoch=0)[:, 0]
    read = reading.reader(split)

    def make(number: int) -> dict:
        return {name: pipeline.tensor(array) for name, array in read(index[number]).items()}

    return pipeline.Batches(make, len(index), READERS, PREFETCH)


def generator(split, known) -> Iterable:
    import h5py
    import tensorflow as tf

    def samples() -> Iterator[np.ndarray]:
        for shard, row in samples_of(split):
            with h5py.File(shard.path, "r") as file:
                yield file["cbed"][row]

    spec = tf.TensorSpec(split.cbed_shape, split.shards[0].cbed_dtype)
    return prepared(tf.data.Dataset.from_generator(samples, output_signature=spec), known)


def lmdb_reader(split, known, directory: Path) -> Iterable:
    import lmdb
    import tensorflow as tf

    from stemdl.data import order

    dtype, shape = split.shards[0].cbed_dtype, split.cbed_shape
    environment = lmdb.open(str(directory), readonly=True, lock=False, max_readers=8)

    def samples() -> Iterator[np.ndarray]:
        with environment.begin(buffers=True) as transaction:
            for index in order.training_order(split.count, BATCH, 1, seed=0, epoch=0).flat:
                found = transaction.get(f"cbed_{index}".encode())
                yield np.frombuffer(found, dtype).reshape(shape)
        environment.close()

    spec = tf.TensorSpec(shape, dtype)
    return prepared(tf.data.Dataset.from_generator(samples, output_signature=spec), known)


def tfrecord(split, known, directory: Path) -> Iterable:
    import tensorflow as tf

    names = [str(path) for path in sorted(directory.glob("*.tfrecord"))]
    dtype, shape = tf.as_dtype(split.shards[0].cbed_dtype), split.cbed_shape

    def decode(record):
        found = tf.io.parse_single_example(record, {"cbed": tf.io.FixedLenFeature([], tf.string)})
        return tf.reshape(tf.io.decode_raw(found["cbed"], dtype), shape)

    dataset = tf.data.TFRecordDataset(names, num_parallel_reads=2)
    return prepared(dataset.map(decode, num_parallel_calls=tf.data.AUTOTUNE), known)


def prepared(dataset, known):
    """Batches, normalised in parallel, as tutorials have it."""
    import tensorflow as tf

    dataset = dataset.batch(BATCH, drop_remainder=True)
    return dataset.map(known.cbed, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


if __name__ == "__main__":
    main()
