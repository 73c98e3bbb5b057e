"""RUN/data.json: what a network was trained on."""

from pathlib import Path

import numpy as np
import pytest

from stemdl.data import normalise, shards, trained_on
from stemdl.errors import UserError
from stemdl.ranks import Ranks
from stemdl.schema import Data


@pytest.mark.parametrize("settings", [Data(), Data(sqrt=False), Data(normalise="global")])
def test_it_says_what_the_training_data_are(tiny_data: Path, settings: Data) -> None:
    split = shards.open_split(tiny_data, "train")
    kind = trained_on.describe(split, normalise.measure(split, settings, Ranks()))
    everything = np.concatenate(
        [shards.read_samples(shard, range(shard.count))["cbed"] for shard in split.shards]
    )
    assert kind.cbed_shape == split.cbed_shape == everything.shape[1:]
    assert kind.potential_shape == split.potential_shape
    assert kind.axes == split.axes
    assert kind.energy == (100, 100) and kind.semi_angle == (20, 20)
    assert kind.intensity == pytest.approx(
        everything.astype(np.float64).sum((-2, -1)).mean(), rel=1e-4
    )


def test_it_survives_the_file(tiny_data: Path, tmp_path: Path) -> None:
    split = shards.open_split(tiny_data, "train")
    kind = trained_on.describe(split, normalise.measure(split, Data(), Ranks()))
    trained_on.save(kind, tmp_path)
    assert trained_on.load(tmp_path) == kind


def test_files_of_another_sampling_are_refused(tiny_data: Path) -> None:
    split = shards.open_split(tiny_data, "train")
    kind = trained_on.describe(split, normalise.measure(split, Data(), Ranks()))
    file = Path("measured.h5")
    trained_on.check(kind, file, {})
    trained_on.check(kind, file, {"scan_step": 0.502, "detector_step": 0.1})
    for attributes, message in (
        ({"scan_step": 0.4}, "scan_step is 0.4 Å, the network was trained on 0.5; .*--match RUN"),
        ({"detector_step": 0.02}, "detector_step is 0.02 1/Å, .* on 0.1;"),
    ):
        with pytest.raises(UserError, match=f"measured.h5: {message}"):
            trained_on.check(kind, file, attributes)


def test_a_run_without_it_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="train first"):
        trained_on.load(tmp_path)


def test_a_damaged_file_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / trained_on.NAME).write_text('{"schema": "stemdl.trained_on/1"}')
    with pytest.raises(UserError, match="damaged"):
        trained_on.load(tmp_path)
