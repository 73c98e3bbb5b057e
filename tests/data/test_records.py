"""The published network's LMDB as a source: the samples of shards, read without a trace."""

import os

import lmdb
import numpy as np
import pytest
from making_shards import DETECTOR, POTENTIAL, SCAN, arrays, data_set

from stemdl import schema
from stemdl.data import normalise, order, pipeline, shards, trained_on
from stemdl.errors import UserError
from stemdl.ranks import Ranks

KNOWN = schema.Records(scan=SCAN, scan_step=0.5, detector_step=0.1)
COUNTS = {"train": (5, 3), "dev": (4,)}


def write_records(path, cbed, potential, name="2d_potential", **header):
    """An environment as the published code wrote them."""
    header = {
        "input_shape": np.array([15, *DETECTOR], np.int64), "input_dtype": b"float16",
        "input_name": b"cbed", "output_shape": np.array([1, *POTENTIAL], np.int64),
        "output_dtype": b"float16", "output_name": name.encode(),
    } | header  # fmt: skip
    with lmdb.open(str(path), subdir=False, map_size=1 << 22) as env, env.begin(write=True) as put:
        for key, value in header.items():
            put.put(key.encode(), bytes(value))
        for index in range(len(cbed)):
            put.put(f"cbed_{index}".encode(), cbed[index].tobytes())
            put.put(f"{name}_{index}".encode(), potential[index].astype("f2").tobytes())
    os.remove(f"{path}-lock")


def content(split, number):
    return arrays(COUNTS[split][number], seed=100 * len(split) + number)


@pytest.fixture
def directory(tmp_path):
    """The samples of `making_shards.data_set(counts=COUNTS)`; numbers sort as numbers."""
    folder = tmp_path / "records"
    folder.mkdir()
    for split, numbers in {"train": (2, 10), "dev": (0,)}.items():
        for place, number in enumerate(numbers):
            found = content(split, place)
            path = folder / f"batch_{split}_{number}.db"
            write_records(path, found["cbed"], found["potential"])
    return folder


def batches(split, settings, start=0):
    known = normalise.measure(split, settings, Ranks())
    steps = order.steps_per_epoch(split.count, 2, 1)
    found = pipeline.training(
        split,
        known,
        settings,
        batch=2,
        seed=3,
        ranks=Ranks(),
        steps_per_epoch=steps,
        steps=range(start, 2 * steps),
    )
    return [{name: value.numpy() for name, value in batch.items()} for batch in found]


def test_records_train_as_shards_do(tmp_path, directory):
    settings = schema.Data(noise=0.1)
    split = shards.open_split(directory, "train", calibration=KNOWN)
    assert split.axes == shards.Axes(0.5, 0.1, 0.25, 0.0)
    assert [shard.path.name for shard in split.shards] == ["batch_train_2.db", "batch_train_10.db"]
    same_samples = shards.open_split(data_set(tmp_path / "shards", COUNTS), "train")
    found, wanted = batches(split, settings), batches(same_samples, settings)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one["index"], other["index"])
        np.testing.assert_array_equal(one["cbed"], other["cbed"])
        np.testing.assert_allclose(one["potential"], other["potential"], atol=5e-3)  # float16
    resumed = batches(split, settings.model_copy(update={"readers": 3}), start=3)
    for one, other in zip(found[3:], resumed, strict=True):
        assert all(one[name].tobytes() == other[name].tobytes() for name in one)


def test_what_records_do_not_say_is_unknown(directory):
    split = shards.open_split(directory, "dev", calibration=KNOWN)
    known = normalise.measure(split, schema.Data(), Ranks())
    kind = trained_on.describe(split, known)
    assert (kind.energy, kind.semi_angle, kind.cbed_unit) == (None, None, "as stored")
    assert len(shards.read_columns(split.shards[0], 1)) == 0
    assert shards.read_table(split.shards[0])["index"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["records", "shards"])
def test_nothing_is_written_to_the_data(tmp_path, directory, kind):
    folder = directory if kind == "records" else data_set(tmp_path / "shards", COUNTS)

    def listing():
        paths = [folder, *sorted(folder.rglob("*"))]
        return [(path, path.stat().st_mtime_ns, path.stat().st_size) for path in paths]

    for path in sorted(folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    folder.chmod(0o555)
    before = listing()
    batches(shards.open_split(folder, "train", calibration=KNOWN), schema.Data())
    assert listing() == before
    for path in (folder, *folder.rglob("*/")):  # so that pytest can remove it
        path.chmod(0o755)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"scan": None}, "15 probes, which are no scan of 3 x 3; set data.records.scan to"),
        ({"scan_step": None}, r"does not say its scan_step; set data.records.scan_step \[Å\]"),
        ({"detector_step": None}, r"set data.records.detector_step \[1/Å\]"),
    ],
)
def test_a_missing_calibration_names_its_key(directory, changed, said):
    with pytest.raises(UserError, match=rf"batch_\w+\.db: .*{said}"):
        shards.open_split(directory, "train", calibration=KNOWN.model_copy(update=changed))


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"output_shape": np.array([2, 3, 10], np.int64)}, "wanted patterns"),
        ({"input_dtype": b"float61"}, "header cannot be understood"),
        ({"input_shape": np.array([15, 7, 12], np.int64)}, "cbed_0 has 2310 bytes, wanted"),
        ({"output_name": b"other"}, "has no key 'other_0'"),
    ],
)
def test_records_of_another_kind_are_refused(tmp_path, header, said):
    found = content("dev", 0)
    path = tmp_path / "batch_dev_0.db"
    write_records(path, found["cbed"], found["potential"], **header)
    with pytest.raises(UserError, match=rf"^{path}: .*{said}"):
        shards.open_split(tmp_path, "dev", calibration=KNOWN)


@pytest.mark.parametrize("damage", ["truncated", "garbage", "removed"])
def test_a_damaged_environment_is_named(directory, damage):
    path = directory / "batch_dev_0.db"
    if damage == "truncated":  # without a check, reading its end would be a bus error
        os.truncate(path, path.stat().st_size // 8192 * 4096)
    elif damage == "garbage":
        path.write_bytes(b"not LMDB at all" * 1000)
    else:
        path.unlink()
    said = {
        "truncated": f"{path}: truncated",
        "garbage": f"{path}: cannot be read as LMDB",
        "removed": f"{directory / 'dev'}: no shards",
    }[damage]
    with pytest.raises(UserError, match=f"^{said}"):
        shards.open_split(directory, "dev", calibration=KNOWN)


def test_a_bad_number_is_reported_with_its_place(tmp_path):
    found = content("dev", 0)
    found["cbed"][2, 0, 0, 0, 0] = np.nan
    write_records(tmp_path / "batch_dev_0.db", found["cbed"], found["potential"])
    split = shards.open_split(tmp_path, "dev", calibration=KNOWN)
    with pytest.raises(UserError, match=r"batch_dev_0\.db: cbed row 2 holds NaN"):
        normalise.measure(split, schema.Data(), Ranks())
