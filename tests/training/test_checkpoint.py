"""Checkpoints hold all of a run, and say what is wrong with those that do not."""

import pytest
import tensorflow as tf

from stemdl.errors import UserError
from stemdl.ranks import Ranks
from stemdl.training import checkpoint
from stemdl.training.checkpoint import Position


def parts(value: float) -> dict[str, list[tf.Variable]]:
    return {
        "weights": [tf.Variable(tf.fill((2, 3), value)), tf.Variable(value)],
        "optimizer": [tf.Variable(7, dtype=tf.int64)],
        "averages": [],
    }


def test_what_was_saved_is_what_is_restored(tmp_path):
    target = tmp_path / "last.h5"
    position = Position(step=5, epoch=1, step_in_epoch=2, best=0.25, pending=[[1.0, 2.0]])
    checkpoint.save(target, position, parts(1.5), "a network")
    fresh = parts(0.0)
    found = checkpoint.restore(target, fresh, "a network", Ranks())
    assert found == position
    assert fresh["weights"][0].numpy().tolist() == [[1.5] * 3] * 2
    assert fresh["optimizer"][0].numpy() == 7


def test_foreign_files_are_refused_by_name(tmp_path):
    target = tmp_path / "last.h5"
    with pytest.raises(UserError, match="no such checkpoint"):
        checkpoint.load(target, "a network", ["weights"])
    checkpoint.save(target, Position(), parts(1.0), "a network")
    with pytest.raises(UserError, match=r"last\.h5: holds another network"):
        checkpoint.load(target, "another", ["weights"])
    with pytest.raises(UserError, match="optimizer does not fit"):
        more = parts(0.0) | {"optimizer": [tf.Variable(0.0), tf.Variable(0.0)]}
        checkpoint.restore(target, more, "a network", Ranks())
    target.write_bytes(target.read_bytes()[:900])
    with pytest.raises(UserError, match=r"last\.h5: cannot be read"):
        checkpoint.load(target, "a network", ["weights"])


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_another_number_of_ranks_goes_on_at_the_same_share_of_the_data(ranks):
    position = Position(
        step=50, epoch=2, step_in_epoch=10, ranks=4, steps_per_epoch=20, pending=[[0.0]] * 4
    )
    steps = 80 // ranks
    position.rescale(ranks, steps)
    assert position.epoch == 2
    assert position.step == position.epoch * steps + position.step_in_epoch
    assert position.step / steps == pytest.approx(2.5, abs=1 / steps)
    assert position.pending == []


def test_the_same_number_of_ranks_changes_nothing():
    position = Position(
        step=50, epoch=2, step_in_epoch=10, ranks=4, steps_per_epoch=20, pending=[[0.5]] * 4
    )
    position.rescale(4, 20)
    assert position.pending == [[0.5]] * 4
    assert (position.step, position.epoch, position.step_in_epoch) == (50, 2, 10)
