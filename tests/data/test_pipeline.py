"""The pipeline: the right samples and numbers, resumable, bounded, and plain about faults."""

import os
import threading
import time

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from making_shards import data_set

from stemdl import files, schema
from stemdl.data import normalise, order, pipeline, reading, shards, symmetry
from stemdl.errors import UserError
from stemdl.ranks import Ranks

PLAIN = schema.Data(symmetry=False)
AUGMENTED = schema.Data(symmetry=True, noise=0.3)


@pytest.fixture
def split(tmp_path):
    return shards.open_split(data_set(tmp_path / "data"), "train")


@pytest.fixture
def square(tmp_path):
    shapes = {"scan": (4, 4), "detector": (5, 5), "potential": (8, 8)}
    return shards.open_split(data_set(tmp_path / "square", **shapes), "train")


def normaliser(split, settings=PLAIN):
    return normalise.measure(split, settings, Ranks())


def batches_of(split, settings=PLAIN, *, batch=2, seed=5, ranks=None, epochs=range(1), start=0):
    """The batches of some epochs from step `start` of the first one on."""
    ranks = ranks or Ranks()
    steps = order.steps_per_epoch(split.count, batch, split.place(ranks)[1])
    return pipeline.training(
        split,
        normaliser(split),
        settings,
        batch=batch,
        seed=seed,
        ranks=ranks,
        steps_per_epoch=steps,
        steps=range(epochs.start * steps + start, epochs.stop * steps),
    )


def training(split, settings=PLAIN, *, epoch=0, **options):
    found = batches_of(split, settings, epochs=range(epoch, epoch + 1), **options)
    return [{name: value.numpy() for name, value in batch.items()} for batch in found]


def evaluation(split, *, batch=4, ranks=None):
    dataset = pipeline.evaluation(
        split, normaliser(split), PLAIN, batch=batch, ranks=ranks or Ranks()
    )
    return [{name: value.numpy() for name, value in batch.items()} for batch in dataset]


def same(first, second):
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name].tobytes() == other[name].tobytes(), name


def stored(split, index):
    shard, row = shards.locate(split, int(index))
    return {name: array[0] for name, array in shards.read_samples(shard, [row]).items()}


sizes = st.integers(1, 6)


@given(count=st.integers(1, 200), batch=sizes, size=sizes, seed=st.integers(0, 9))
def test_an_epoch_uses_each_sample_at_most_once_on_all_ranks(count, batch, size, seed):
    if count < batch * size:
        with pytest.raises(UserError, match=f"{count} training samples are fewer .* {size} ranks"):
            order.training_order(count, batch, size, seed=seed, epoch=0)
        return
    found = order.training_order(count, batch, size, seed=seed, epoch=0)
    assert found.shape == (count // (batch * size), size, batch)
    assert len(set(found.flat)) == found.size
    assert set(found.flat) <= set(range(count))


@given(count=st.integers(8, 100), batch=st.integers(1, 2), seed=st.integers(0, 9))
def test_two_ranks_see_the_global_batches_of_one_with_twice_the_batch(count, batch, seed):
    two = order.training_order(count, batch, 2, seed=seed, epoch=3)
    one = order.training_order(count, 2 * batch, 1, seed=seed, epoch=3)
    np.testing.assert_array_equal(two.reshape(one.shape), one)


def test_epochs_and_seeds_shuffle_differently():
    orders = [
        order.training_order(50, 5, 1, seed=seed, epoch=epoch).tobytes()
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    assert len(set(orders)) == 4


@given(count=st.integers(1, 60), batch=sizes, size=sizes)
def test_evaluation_uses_each_sample_once_with_equal_batches(count, batch, size):
    steps = -(-count // (size * batch))
    parts = [order.evaluation_order(count, batch, rank, size, steps) for rank in range(size)]
    assert {index.shape for index, _ in parts} == {(steps, batch)}
    used = [int(i) for index, weight in parts for i in index[weight > 0]]
    assert sorted(used) == list(range(count))


@pytest.mark.parametrize("compression", ["none", "gzip"])
@pytest.mark.parametrize("dtype", shards.DTYPES)
def test_batches_hold_the_normalised_samples(tmp_path, dtype, compression):
    data = data_set(tmp_path / "data", dtype=dtype, compression=compression)
    split = shards.open_split(data, "train")
    batches = training(split, batch=4)
    assert len(batches) == 3
    known = normaliser(split)
    for batch in batches:
        assert batch["cbed"].dtype == batch["potential"].dtype == np.float32
        assert batch["index"].dtype == np.int32
        assert (batch["weight"] == 1).all()
        for place, index in enumerate(batch["index"]):
            sample = stored(split, index)
            np.testing.assert_allclose(batch["cbed"][place], known.cbed(sample["cbed"]), atol=1e-5)
            np.testing.assert_allclose(
                batch["potential"][place], known.potential(sample["potential"]), atol=1e-5
            )


@pytest.mark.parametrize("dtype", [">f4", ">u2", "<f8", "<i4"])
def test_types_that_we_do_not_write_are_read_too(tmp_path, dtype):
    data = data_set(tmp_path / "data", listed=False)
    for path in data.glob("train/*.h5"):
        with h5py.File(path, "r+") as file:
            content = (100 * file["cbed"][:].astype(np.float64)).astype(dtype)
            del file["cbed"]
            file["cbed"] = content
    split = shards.open_split(data, "train")
    known = normaliser(split)
    for batch in training(split, batch=4):
        for place, index in enumerate(batch["index"]):
            wanted = known.cbed(stored(split, index)["cbed"])
            np.testing.assert_allclose(batch["cbed"][place], wanted, atol=1e-5)


@pytest.mark.parametrize("shape", ["split", "square"])
def test_symmetry_acts_on_patterns_and_potential_alike(shape, request):
    split = request.getfixturevalue(shape)
    count = symmetry.order(split.cbed_shape, split.potential_shape)
    known, found = normaliser(split), {}
    for epoch in range(6):
        for batch in training(split, schema.Data(symmetry=True), batch=3, epoch=epoch):
            for place, index in enumerate(batch["index"]):
                sample = stored(split, index)
                fitting = [
                    operation
                    for operation in range(count)
                    if np.allclose(
                        batch["cbed"][place],
                        known.cbed(symmetry.apply(operation, sample["cbed"])),
                        atol=1e-5,
                    )
                ]
                (operation,) = fitting
                wanted = known.potential(symmetry.apply(operation, sample["potential"]))
                np.testing.assert_allclose(batch["potential"][place], wanted, atol=1e-5)
                found[epoch, int(index)] = operation
    assert set(found.values()) == set(range(count))
    two = training(split, schema.Data(symmetry=True), ranks=Ranks(1, 2), batch=3, epoch=2)
    for batch in two:  # the same for the same sample, wherever it is used
        for place, index in enumerate(batch["index"]):
            turned = symmetry.apply(found[2, int(index)], stored(split, index)["cbed"])
            np.testing.assert_allclose(batch["cbed"][place], known.cbed(turned), atol=1e-5)


def test_noise_mixes_in_unit_noise_at_a_level_of_its_own(split):
    level = 0.4
    plain = training(split, batch=5)
    noisy = training(split, schema.Data(symmetry=False, noise=level), batch=5)
    levels = []
    for clean, mixed in zip(plain, noisy, strict=True):
        np.testing.assert_array_equal(clean["potential"], mixed["potential"])
        for x, y in zip(clean["cbed"], mixed["cbed"], strict=True):
            a = 1 - np.vdot(x, y) / np.vdot(x, x)  # u is independent of x
            u = (y - (1 - a) * x) / a if a > 0.1 else np.empty(0)
            levels.append(a)
            if u.size:
                assert abs(u.mean()) < 0.2
                assert u.std() == pytest.approx(1, abs=0.2)
    assert -0.1 < min(levels) < 0.2 < max(levels) < level + 0.1
    again = training(split, schema.Data(symmetry=False, noise=level), batch=5, epoch=1)
    assert not np.array_equal(again[0]["cbed"], noisy[0]["cbed"])


def test_the_same_bits_for_any_number_of_readers(split):
    first = training(split, AUGMENTED.model_copy(update={"readers": 1, "prefetch": 1}))
    same(first, training(split, AUGMENTED.model_copy(update={"readers": 4, "prefetch": 3})))


def test_resuming_gives_the_remaining_batches_bit_for_bit(split):
    whole = training(split, AUGMENTED, epoch=2)
    for start in (1, 4, 7):
        same(whole[start:], training(split, AUGMENTED, epoch=2, start=start))


def test_one_pipeline_goes_through_all_epochs(split):
    many = batches_of(split, AUGMENTED, epochs=range(1, 4), start=2)
    together = [{name: value.numpy() for name, value in batch.items()} for batch in many]
    apart = [batch for epoch in (1, 2, 3) for batch in training(split, AUGMENTED, epoch=epoch)]
    same(together, apart[2:])
    same(together, [{name: value.numpy() for name, value in batch.items()} for batch in many])


def test_batches_are_made_while_one_is_in_use():
    made = threading.Semaphore(0)

    def make(number):
        made.release()
        if number == 3:
            raise UserError("no more")
        return {"number": number}

    batches = iter(pipeline.Batches(make, count=5, readers=1, prefetch=1))
    for number in range(3):
        assert next(batches) == {"number": number}
        assert made.acquire(timeout=30)
    assert made.acquire(timeout=30)  # number 3, before it is asked for
    with pytest.raises(UserError, match="no more"):
        next(batches)
    assert list(pipeline.Batches(make, count=0, readers=1, prefetch=1)) == []


def test_a_device_that_decodes_gets_the_same_batches(split, monkeypatch):
    """As with a GPU, which is sent what is stored."""
    wanted = training(split, AUGMENTED, batch=3)
    monkeypatch.setattr(pipeline, "_gpu", lambda: "/CPU:0")
    found = batches_of(split, AUGMENTED, batch=3)
    for one, other in zip(wanted, found, strict=True):
        for name in one:
            np.testing.assert_allclose(one[name], other[name], atol=1e-5)


def test_two_ranks_get_the_same_bits_as_one_with_twice_the_batch(split):
    one = training(split, AUGMENTED, batch=4)
    two = [training(split, AUGMENTED, batch=2, ranks=Ranks(rank, 2)) for rank in range(2)]
    joined = [
        {name: np.concatenate([first[name], second[name]]) for name in first}
        for first, second in zip(*two, strict=True)
    ]
    same(one, joined)


def test_evaluation_pads_with_weight_zero(split):
    ranks = [evaluation(split, batch=4, ranks=Ranks(rank, 2)) for rank in range(2)]
    assert [len(batches) for batches in ranks] == [2, 2]
    index = np.concatenate([batch["index"] for batches in ranks for batch in batches])
    weight = np.concatenate([batch["weight"] for batches in ranks for batch in batches])
    assert sorted(index[weight == 1]) == list(range(15))
    assert (weight == 0).sum() == 1


def test_measured_data_have_no_potential(tmp_path, split):
    data = tmp_path / "measured"
    for shard in split.shards:
        found = shards.read_samples(shard, range(shard.count))
        shards.write(
            data / "test" / shard.path.name,
            cbed=found["cbed"],
            potential=None,
            columns=np.zeros(0, shards.COLUMN),
            samples=shards.read_table(shard),
            axes=shard.axes,
            creator="tests",
        )
    measured = shards.open_split(data, "test")
    dataset = pipeline.evaluation(measured, normaliser(split), PLAIN, batch=4, ranks=Ranks())
    assert "potential" not in next(iter(dataset))


def test_a_part_of_a_shard_is_read_from_its_first_row(split):
    """Staging deals rows of a shard to nodes."""
    directory = split.directory
    content = {
        "parts": ["train"],
        "splits": {"train": [["00000.h5", 3, 2], ["00002.h5", 0, 4]]},
    }
    files.write_json(directory / shards.DEAL_NAME, shards.DEAL, content)
    part = shards.open_split(directory, "train")
    assert (part.count, part.node_part) == (6, True)
    known = normaliser(part)
    (batch,) = training(part, batch=6)
    for place, index in enumerate(batch["index"]):
        whole = [3, 4, 8, 9, 10, 11][index]
        wanted = known.cbed(stored(split, whole)["cbed"])
        np.testing.assert_allclose(batch["cbed"][place], wanted, atol=1e-5)
    # The ranks of the node share it, whatever their numbers in the whole job.
    ranks = [Ranks(rank, 8, local_rank=rank - 4, local_size=2) for rank in (4, 5)]
    seen = [training(part, batch=3, ranks=each)[0]["index"] for each in ranks]
    assert sorted(np.concatenate(seen)) == list(range(6))


def test_memory_is_bounded_by_readers_and_prefetch(tmp_path, monkeypatch):
    split = shards.open_split(data_set(tmp_path / "data", {"train": (40,)}), "train")
    lock, reads = threading.Lock(), []
    lying = reading._lying

    def counting(*arguments):
        with lock:
            reads.append(time.monotonic())
        return lying(*arguments)

    monkeypatch.setattr(reading, "_lying", counting)
    bounds = schema.Data(symmetry=False, readers=2, prefetch=3)
    batches = iter(batches_of(split, bounds, batch=1))
    for taken in range(1, 6):
        next(batches)
        time.sleep(0.3)  # long enough to read all 40, were there no bound
        assert taken < len(reads) <= taken + 2 + 3 + 1


def test_memory_is_used_again_when_nobody_holds_it():
    memory, dtype = reading.Memory(), np.dtype("float16")
    first, second = memory.take((3, 5), dtype), memory.take((3, 5), dtype)
    places = {first.ctypes.data, second.ctypes.data}
    assert len(places) == 2
    assert all(place % reading.ALIGNMENT == 0 for place in places)
    del first
    third = memory.take((3, 5), dtype)
    assert third.ctypes.data in places
    assert third.ctypes.data != second.ctypes.data
    assert memory.take((3, 6), dtype).shape == (3, 6)


def test_few_files_are_held_open(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "OPEN_FILES", 2)
    split = shards.open_split(data_set(tmp_path / "data", {"train": (2,) * 12}), "train")

    def held():
        links = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
        return sum(str(tmp_path) in os.path.realpath(link) for link in links)

    most = 0
    for _ in batches_of(split):
        most = max(most, held())
    assert 1 <= most <= 2 + PLAIN.readers


def test_a_bad_number_in_any_split_is_reported_with_its_place(tmp_path, split):
    known = normaliser(split)
    content = shards.read_samples(split.shards[0], range(5))
    content["potential"][2, 0, 0] = np.nan
    shards.write(
        tmp_path / "other" / "dev" / "a.h5",
        **content,
        columns=np.zeros(0, shards.COLUMN),
        samples=shards.read_table(split.shards[0]),
        axes=split.axes,
        creator="tests",
    )
    dev = shards.open_split(tmp_path / "other", "dev")
    dataset = pipeline.evaluation(dev, known, PLAIN, batch=2, ranks=Ranks())
    with pytest.raises(UserError, match=r"^\S*a\.h5: potential row 2 holds NaN or infinity; \D*$"):
        list(dataset)


@pytest.mark.parametrize("fault", ["truncated", "removed"])
def test_a_shard_that_goes_away_while_training_is_named(split, fault):
    dataset = batches_of(split)
    path = split.shards[1].path
    if fault == "truncated":
        os.truncate(path, 5000)
    else:
        path.unlink()
    with pytest.raises(UserError, match=rf"^{path}: "):
        list(dataset)


def test_statistics_of_another_detector_are_refused(split, square):
    with pytest.raises(UserError, match=r"detector is \(7, 11\), wanted \(5, 5\)"):
        pipeline.evaluation(split, normaliser(square), PLAIN, batch=2, ranks=Ranks())
