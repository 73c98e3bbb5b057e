"""The shard format: what is written is read, and what is damaged is named."""

import os
import stat
import subprocess
import sys

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from making_shards import AXES, DETECTOR, POTENTIAL, SCAN, arrays, data_set, flip_byte, write

from stemdl.data import manifest, shard_writing, shards
from stemdl.errors import UserError


@pytest.mark.parametrize("compression", ["none", "gzip"])
@pytest.mark.parametrize("dtype", shards.DTYPES)
def test_what_is_written_is_read(tmp_path, dtype, compression):
    content = write(tmp_path / "a.h5", 6, dtype=dtype, compression=compression)
    shard = shards.open_shard(tmp_path / "a.h5")
    assert (shard.count, shard.cbed_shape, shard.potential_shape) == (6, SCAN + DETECTOR, POTENTIAL)
    assert shard.axes == AXES
    rows = [4, 1, 1]
    found = shards.read_samples(shard, rows)
    assert found["cbed"].dtype == dtype
    np.testing.assert_array_equal(found["cbed"], content["cbed"][rows])
    np.testing.assert_array_equal(found["potential"], content["potential"][rows])
    assert shards.read_table(shard).tobytes() == content["samples"].tobytes()
    assert shards.read_table(shard)["material"][3].decode() == "Ga3Ås"
    np.testing.assert_array_equal(shards.read_columns(shard, 2)["y"], [2, 8])
    shards.verify(shard.path)


def test_a_contiguous_sample_is_one_byte_range(tmp_path):
    content = write(tmp_path / "a.h5", 4)
    shard = shards.open_shard(tmp_path / "a.h5")
    size = content["cbed"][0].nbytes
    with open(shard.path, "rb") as file:
        file.seek(shard.cbed_offset + 2 * size)
        row = np.frombuffer(file.read(size), shard.cbed_dtype).reshape(shard.cbed_shape)
    np.testing.assert_array_equal(row, content["cbed"][2])
    assert shard.cbed_offset % shards.ALIGNMENT == 0


def test_other_programs_find_axes_and_units(tmp_path):
    write(tmp_path / "a.h5", 2)
    with h5py.File(tmp_path / "a.h5") as file:
        assert list(file.attrs["cbed_axes"])[1:] == [
            "scan_y",
            "scan_x",
            "detector_ky",
            "detector_kx",
        ]
        np.testing.assert_allclose(file.attrs["cbed_sampling"], [1, 0.5, 0.5, 0.1, 0.1])
        assert list(file.attrs["potential_units"]) == ["", "Å", "Å"]
        assert file.attrs["potential_unit"] == "V"
        assert file["sample"]["material"][1].decode() == "Ga1Ås"


def test_measured_data_have_no_potential(tmp_path):
    content = arrays(3) | {"potential": None}
    shards.write(tmp_path / "a.h5", **content, axes=AXES, creator="tests")
    shard = shards.open_shard(tmp_path / "a.h5")
    assert shard.potential_shape is None
    assert set(shards.read_samples(shard, [0])) == {"cbed"}
    shards.verify(shard.path)


def test_same_content_same_bytes(tmp_path):
    write(tmp_path / "a.h5", 3)
    write(tmp_path / "b.h5", 3)
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()


def test_a_failed_write_leaves_what_was_there(tmp_path):
    write(tmp_path / "a.h5", 3)
    before = (tmp_path / "a.h5").read_bytes()
    content = arrays(3)
    content["samples"] = content["samples"][:2]
    with pytest.raises(ValueError, match="samples"):
        shards.write(tmp_path / "a.h5", **content, axes=AXES, creator="tests")
    assert [path.name for path in tmp_path.iterdir()] == ["a.h5"]
    assert (tmp_path / "a.h5").read_bytes() == before


@settings(max_examples=25, deadline=None)
@given(part=st.floats(0, 1, exclude_max=True))
def test_truncation_is_found_on_opening(tmp_path_factory, part):
    path = tmp_path_factory.mktemp("cut") / "a.h5"
    write(path, 3)
    os.truncate(path, int(path.stat().st_size * part))
    with pytest.raises(UserError, match=r"a\.h5: (truncated|is no HDF5 file)"):
        shards.open_shard(path)


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_verify_names_dataset_and_rows(tmp_path, compression, monkeypatch):
    monkeypatch.setattr(shard_writing, "BLOCK_BYTES", 2 * np.prod(SCAN + DETECTOR) * 2)  # two rows
    path = tmp_path / "a.h5"
    write(path, 6, compression=compression)
    with h5py.File(path) as file:
        if compression == "none":
            offset = file["cbed"].id.get_offset() + 3 * file["cbed"][0].nbytes + 5
        else:
            offset = file["cbed"].id.get_chunk_info(3).byte_offset + 50
    flip_byte(path, offset)
    with pytest.raises(UserError, match=r"a\.h5: cbed rows 2 to 3 are corrupt"):
        shards.verify(path)


@pytest.mark.parametrize("dataset", ["potential", "sample", "columns"])
def test_verify_covers_every_dataset(tmp_path, dataset):
    path = tmp_path / "a.h5"
    write(path, 3)
    with h5py.File(path) as file:
        offset = file[dataset].id.get_offset()
    flip_byte(path, offset + 1)
    with pytest.raises(UserError, match=f"{dataset} rows 0 to"):
        shards.verify(path)


def test_foreign_and_missing_files(tmp_path):
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["cbed"] = np.zeros(3)
    with pytest.raises(UserError, match=r"other\.h5: format is None, wanted 'stemdl.shard/1'"):
        shards.open_shard(tmp_path / "other.h5")
    (tmp_path / "text.h5").write_text("not HDF5 at all")
    with pytest.raises(UserError, match=r"text\.h5: is no HDF5 file"):
        shards.open_shard(tmp_path / "text.h5")
    with pytest.raises(UserError, match=r"none\.h5: no such file"):
        shards.open_shard(tmp_path / "none.h5")


def test_a_file_held_open_for_writing_elsewhere_reads(tmp_path):
    path = tmp_path / "a.h5"
    content = write(path, 2)
    holder = subprocess.Popen(
        [sys.executable, "-c", f"import h5py; f = h5py.File({str(path)!r}, 'a'); input(f['cbed'])"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout.read(1)  # it prints once the file is open and locked
        found = shards.read_samples(shards.open_shard(path), [1])
        np.testing.assert_array_equal(found["cbed"][0], content["cbed"][1])
    finally:
        holder.communicate(b"\n", timeout=30)


def test_a_read_only_directory_reads(tmp_path):
    data = data_set(tmp_path / "data")
    for path in [data, *data.rglob("*")]:
        path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    assert shards.open_split(data, "train").count == 15
    for path in [data, *data.rglob("*")]:
        path.chmod(path.stat().st_mode | stat.S_IWUSR)


def test_a_split_is_one_list_of_samples(tmp_path):
    split = shards.open_split(data_set(tmp_path / "data"), "train")
    assert (split.count, split.cbed_shape, split.potential_shape) == (
        15,
        SCAN + DETECTOR,
        POTENTIAL,
    )
    places = [shards.locate(split, index) for index in range(15)]
    assert [(shard.path.name, row) for shard, row in places] == [
        (f"{number:05d}.h5", row) for number, count in enumerate((5, 3, 7)) for row in range(count)
    ]
    with pytest.raises(IndexError):
        shards.locate(split, 15)


def test_splits_of_mixed_or_no_shards(tmp_path):
    data = data_set(tmp_path / "data")
    write(data / "train" / "99999.h5", 2, detector=(7, 13))
    with pytest.raises(UserError, match=r"99999\.h5: cbed_shape is \(3, 5, 7, 13\), wanted"):
        shards.open_split(data, "train")
    with pytest.raises(UserError, match="no shards"):
        shards.open_split(data, "other")
    with pytest.raises(UserError, match="no such data directory"):
        shards.open_split(tmp_path / "nowhere", "train")


def test_an_unreadable_directory_is_named(tmp_path, monkeypatch):
    data = data_set(tmp_path / "data")

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shards.os, "scandir", refuse)  # tests may run as root, whom nothing stops
    with pytest.raises(UserError, match="train: cannot be read"):
        shards.open_split(data, "train")


def test_manifest_records_the_whole_file(tmp_path):
    data = data_set(tmp_path / "data")
    records = {record["path"]: record for record in manifest.read_manifest(data)}
    assert sorted(records) == sorted(
        path.relative_to(data).as_posix() for path in data.glob("*/*.h5")
    )
    record = records["train/00002.h5"]
    assert (record["count"], record["bytes"]) == (7, (data / record["path"]).stat().st_size)
    assert manifest.checksum(data / record["path"]) == record["checksum"]
    flip_byte(data / record["path"], record["bytes"] // 2)
    assert manifest.checksum(data / record["path"]) != record["checksum"]
    (data / "manifest.json").write_text('{"schema": "stemdl.manifest/1", "shards": [{}]}')
    with pytest.raises(UserError, match=r"manifest\.json: wanted a list 'shards'"):
        manifest.read_manifest(data)
