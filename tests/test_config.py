"""Experiment files: every mistake is one line that says what to do."""

from pathlib import Path

import pytest
import yaml

from stemdl import config
from stemdl.errors import UserError
from stemdl.schema import Experiment

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_load_and_survive_a_round_trip(path):
    experiment = config.load(path)
    assert config.build(yaml.safe_load(config.dump(experiment)), "again") == experiment


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"trian": {}}, "unknown key 'trian'; did you mean 'train'?"),
        ({"train": {"bacth": 3}}, "unknown key 'train.bacth'; did you mean 'train.batch'?"),
        ({"train": {"lr": 1e-3}}, "did you mean 'train.optimizer.lr'?"),
        ({"train": {"batch": -1}}, "train.batch is -1, wanted greater than 0"),
        ({"simulate": {"box": 0}}, "simulate.box is 0, wanted greater than 0 [Å]"),
        ({"simulate": {"energy": "200 keV"}}, "simulate.energy is '200 keV', wanted"),
        ({"simulate": {"energy": [200, 60]}}, "the range must rise"),
        ({"simulate": {"thickness": float("nan")}}, "simulate.thickness"),
        ({"reduction": {"planner": "magic"}}, "reduction.planner is 'magic', wanted"),
        ({"train": {"precision": {"compute": "fp16"}}}, "needs train.precision.scaler"),
        ({"simulate": {"dtype": "uint16"}}, "needs simulate.dose"),
        ({"train": {"batch": 4, "accumulate": 3}}, "train.accumulate"),
    ],
)
def test_mistakes_name_file_key_found_and_wanted(tree, said):
    with pytest.raises(UserError) as error:
        config.build(tree, "my.yaml")
    assert str(error.value).startswith("my.yaml: ")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_several_mistakes_are_told_at_once():
    with pytest.raises(UserError, match=r"train\.batch.*train\.epochs"):
        config.build({"train": {"batch": 0, "epochs": 0}}, "my.yaml")


def test_overrides_reach_any_depth_and_read_numbers_as_people_write_them(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("train: {optimizer: {lr: 1e-2}}\nnetwork:\n")
    found = config.load(
        path, ["train.optimizer.lr=5e-4", "network.layers=[1, 2]", "train.clip_norm=null"]
    )
    assert found.train.optimizer.lr == 5e-4
    assert found.network.layers == (1, 2)
    assert found.train.clip_norm is None


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.batch", "wanted key=value"),
        ("=3", "wanted key=value"),
        ("train.batch.size=3", "train.batch"),
        ("name.x=3", "'name' is not a section"),
        ("train.batch=[", "not YAML"),
        ("train.bach=3", "did you mean 'train.batch'?"),
    ],
)
def test_wrong_overrides(tmp_path, override, said):
    path = tmp_path / "x.yaml"
    path.write_text("name: here")
    with pytest.raises(UserError) as error:
        config.load(path, [override])
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "cannot be read"), ("a: [", "is not YAML"), ("- 1", "wanted sections")],
)
def test_unreadable_files(tmp_path, content, said):
    path = tmp_path / "x.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=said):
        config.load(path)


def test_an_empty_file_is_all_defaults(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("")
    assert config.load(path) == Experiment()


def test_every_key_is_described():
    meanings = config.keys()
    assert [key for key, text in meanings.items() if not text] == []
    described = config.describe()
    assert [key for key in meanings if f"{key} = " not in described] == []
