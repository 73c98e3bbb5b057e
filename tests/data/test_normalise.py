"""Statistics: right, the same for any number of ranks, and strict about bad numbers."""

import numpy as np
import pytest
import tensorflow as tf
from making_shards import AXES, DETECTOR, arrays, data_set

from stemdl import schema
from stemdl.data import normalise, shards
from stemdl.errors import UserError
from stemdl.ranks import Ranks


@pytest.fixture
def split(tmp_path):
    return shards.open_split(data_set(tmp_path / "data"), "train")


def everything(split):
    found = [shards.read_samples(shard, range(shard.count)) for shard in split.shards]
    return (np.concatenate([each[name] for each in found]) for name in ("cbed", "potential"))


@pytest.mark.parametrize("sqrt", [True, False])
@pytest.mark.parametrize("kind", ["pixel", "global"])
def test_statistics_are_those_of_the_whole_split(split, sqrt, kind):
    settings = schema.Data(sqrt=sqrt, normalise=kind)
    found = normalise.measure(split, settings, Ranks())
    cbed, potential = everything(split)
    cbed = cbed.astype(float)
    cbed = np.sqrt(cbed) if sqrt else cbed
    axes = (0, 1, 2) if kind == "pixel" else None
    np.testing.assert_allclose(found.cbed_mean, cbed.mean(axes), rtol=1e-5)
    np.testing.assert_allclose(found.cbed_std, cbed.std(axes), rtol=1e-5)
    assert found.cbed_mean.shape == (DETECTOR if kind == "pixel" else ())
    assert found.potential_mean == pytest.approx(potential.mean(dtype=float), rel=1e-9)
    assert found.potential_std == pytest.approx(potential.std(dtype=float), rel=1e-9)


@pytest.mark.parametrize("dtype", shards.DTYPES)
def test_arrays_and_tensors_are_normalised_alike_and_back(tmp_path, dtype):
    split = shards.open_split(data_set(tmp_path / "data", dtype=dtype), "train")
    found = normalise.measure(split, schema.Data(), Ranks())
    cbed, potential = everything(split)
    ready = found.cbed(cbed)
    assert ready.dtype == np.float32
    np.testing.assert_allclose(ready.mean((0, 1, 2)), 0, atol=1e-4)
    np.testing.assert_allclose(ready.std((0, 1, 2)), 1, rtol=1e-4)
    np.testing.assert_allclose(found.cbed(tf.constant(cbed)), ready, atol=1e-5)
    np.testing.assert_allclose(found.volts(found.potential(potential)), potential, rtol=1e-5)


@pytest.mark.parametrize("size", [2, 3, 20])
def test_each_rank_measures_its_own_part(split, size, monkeypatch):
    """The sums of all ranks are those of one rank; 20 ranks are more than there are samples."""
    whole, *parts = (sums(split, ranks, monkeypatch) for ranks in [Ranks(), *others(size)])
    assert len(parts) == size
    np.testing.assert_allclose(sum(parts), whole, rtol=1e-12)


def others(size):
    return [Ranks(rank, size) for rank in range(size)]


def sums(split, ranks, monkeypatch):
    """What one rank adds to the total."""

    class Stop(Exception):
        pass

    def stop(self, values):
        raise Stop(values)

    monkeypatch.setattr(Ranks, "total", stop)
    with pytest.raises(Stop) as caught:
        normalise.measure(split, schema.Data(), ranks)
    return caught.value.args[0]


def test_it_tells_that_it_moves(split, monkeypatch):
    monkeypatch.setattr(normalise, "READ_BYTES", split.shards[0].cbed_bytes)
    moves = []
    normalise.measure(split, schema.Data(), Ranks(), lambda: moves.append(1))
    assert len(moves) == split.count


def test_patterns_below_zero_count_as_zero(split):
    found = normalise.measure(split, schema.Data(), Ranks())
    below = np.full((1, *DETECTOR), -3, np.float32)
    np.testing.assert_array_equal(found.cbed(below), found.cbed(0 * below))
    np.testing.assert_allclose(found.cbed(tf.constant(below)), found.cbed(below), rtol=1e-6)


def rewrite(path, change):
    """Make the shard again with changed arrays."""
    content = arrays(5)
    change(content)
    path.unlink()
    shards.write(path, **content, axes=AXES, creator="tests")


def test_a_dead_pixel_does_not_explode(tmp_path):
    data = data_set(tmp_path / "data", {"train": (5,)})

    def kill(content):
        content["cbed"][..., 2, 3] = 0.25

    rewrite(data / "train" / "00000.h5", kill)
    split = shards.open_split(data, "train")
    found = normalise.measure(split, schema.Data(), Ranks())
    assert found.cbed_std.min() == pytest.approx(1e-3 * found.cbed_std.max())
    noisy = np.full((1, *DETECTOR), 0.2501, np.float32)
    assert abs(found.cbed(noisy)[0, 2, 3]) < 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dataset", ["cbed", "potential"])
def test_a_bad_number_is_reported_with_file_dataset_and_row(tmp_path, dataset, bad):
    data = data_set(tmp_path / "data", {"train": (5, 5)})

    def spoil(content):
        content[dataset][3].flat[4] = bad

    rewrite(data / "train" / "00001.h5", spoil)
    split = shards.open_split(data, "train")
    with pytest.raises(UserError, match=rf"00001\.h5: {dataset} row 3 holds NaN or infinity"):
        normalise.measure(split, schema.Data(), Ranks())


def test_data_that_teach_nothing_are_refused(tmp_path):
    data = data_set(tmp_path / "data", {"train": (5,)})
    rewrite(data / "train" / "00000.h5", lambda content: content["potential"].fill(2))
    with pytest.raises(UserError, match="all potentials are the same"):
        normalise.measure(shards.open_split(data, "train"), schema.Data(), Ranks())
    rewrite(data / "train" / "00000.h5", lambda content: content.update(potential=None))
    with pytest.raises(UserError, match="holds no potentials"):
        normalise.measure(shards.open_split(data, "train"), schema.Data(), Ranks())


def test_saved_statistics_come_back_bit_for_bit(split, tmp_path):
    found = normalise.measure(split, schema.Data(), Ranks())
    normalise.save(found, tmp_path / "run" / "n.npz")
    again = normalise.load(tmp_path / "run" / "n.npz")
    for name in ("sqrt", "potential_mean", "potential_std"):
        assert getattr(again, name) == getattr(found, name)
    assert again.cbed_mean.tobytes() == found.cbed_mean.tobytes()
    assert again.cbed_std.tobytes() == found.cbed_std.tobytes()


def test_wrong_files_are_refused(split, tmp_path):
    with pytest.raises(UserError, match=r"n\.npz: cannot be read"):
        normalise.load(tmp_path / "n.npz")
    (tmp_path / "n.npz").write_text("something else")
    with pytest.raises(UserError, match=r"n\.npz: is no file of normalisation"):
        normalise.load(tmp_path / "n.npz")
    np.savez(tmp_path / "n.npz", a=1)
    with pytest.raises(UserError, match=r"n\.npz: is no file of normalisation"):
        normalise.load(tmp_path / "n.npz")
    normalise.save(normalise.measure(split, schema.Data(), Ranks()), tmp_path / "n.npz")
    whole = (tmp_path / "n.npz").read_bytes()
    (tmp_path / "n.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"n\.npz: is no file of normalisation"):
        normalise.load(tmp_path / "n.npz")
