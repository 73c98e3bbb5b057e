"""Status and comparison of runs, from files alone."""

import json
import os
from pathlib import Path

import h5py
import pytest
import yaml

from stemdl import cli, config, files
from stemdl.errors import UserError
from stemdl.launch import chain, compare, status

NOW = 1_000_000.0


def make(run: Path, *, lr: float = 1e-3, epochs: float = 3.0, scored: bool = True) -> Path:
    """A run of 10 epochs with 100 steps each, saved after `epochs`."""
    experiment = config.build(
        {"run": str(run), "train": {"epochs": 10, "optimizer": {"lr": lr}}}, "made"
    )
    files.write_bytes(run / "config.yaml", config.dump(experiment).encode())
    lines = []
    for step in range(50, int(epochs * 100) + 1, 50):
        each = {"kind": "train", "step": step, "epoch": step / 100, "loss": 1 / step}
        each |= {"samples_per_s": 640.0, "data_s": 0.01, "compute_s": 0.08, "reduction_s": 0.01}
        lines.append(each)
        if step % 100 == 0:
            dev = {"kind": "dev", "step": step, "epoch": step / 100, "loss": 10 * lr + 1 / step}
            lines.append(dev | {"pearson": 0.9})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "metrics.jsonl").write_text(text + '{"kind": "train", "st')  # cut by a kill
    position = {"step": int(epochs * 100), "steps_per_epoch": 100, "ranks": 6, "best": 0.1}
    position["clock"] = {"compile": 20.0, "compute": 160.0, "data": 20.0}
    (run / "checkpoints").mkdir()
    with h5py.File(run / "checkpoints" / "last.h5", "w") as file:
        file.attrs["position"] = json.dumps(position)
    if scored:
        scores = {"pearson": {"median": 0.9912}, "columns": {"recall": 0.96, "precision": 0.98}}
        files.write_json(
            run / "report" / "metrics.json", "stemdl.metrics/1", {"split": "test", "test": scores}
        )
    return run


def add_chain(run: Path, **last) -> None:
    jobs = [{"job": "41", "code": 75}, {"job": "42", "begun": NOW - 60, "ends": NOW + 5400} | last]
    record = {"chain": "c", "scheduler": "slurm", "state": "running", "jobs": jobs}
    files.write_json(run / chain.CHAIN, chain.CHAIN_SCHEMA, record)


def test_status_of_a_running_run(tmp_path):
    run = make(tmp_path / "run")
    add_chain(run)
    for path in (run / "metrics.jsonl", run / "checkpoints" / "last.h5", run / chain.CHAIN):
        os.utime(path, (NOW - 90, NOW - 90))
    text = status.status(run, NOW)
    assert "running, last sign of life 2 min ago: epoch 3.00 of 10, step 300" in text
    assert "loss       0.003333 at step 300" in text
    assert "loss 0.01333, Pearson 0.9000 at epoch 3.00" in text
    assert "640.0 samples/s" in text
    assert "about 1 min of training to go" in text  # 700 steps of 0.1 s
    assert "3 min: compute 80%, compile 10%, data 10%" in text
    assert "step 300, 2 min ago, of 6 ranks" in text
    assert "42: 1 h 30 min left in the allocation" in text


@pytest.mark.parametrize(
    ("last", "said"),
    [({"code": 75}, "between jobs"), ({"ends": NOW - 1}, "over time")],
)
def test_status_between_jobs_and_over_time(last, said, tmp_path):
    run = make(tmp_path / "run")
    add_chain(run, **last)
    assert said in status.status(run, NOW)


def test_status_of_a_run_that_has_only_begun(tmp_path):
    run = tmp_path / "run"
    files.write_bytes(run / "config.yaml", config.dump(config.build({}, "made")).encode())
    assert "epoch 0.00 of 20, step 0" in status.status(run)


def test_status_of_a_run_that_is_done(tmp_path):
    assert "trained: epoch 10.00 of 10" in status.status(make(tmp_path / "run", epochs=10.0))


def test_no_run_and_a_damaged_checkpoint_are_users_mistakes(tmp_path):
    with pytest.raises(UserError, match="is no run"):
        status.status(tmp_path)
    run = make(tmp_path / "run")
    (run / "checkpoints" / "last.h5").write_bytes(b"torn")
    with pytest.raises(UserError, match="cannot be read as a checkpoint"):
        status.status(run)


def test_durations():
    assert [status.duration(each) for each in (5, 61, 3700)] == ["5 s", "1 min", "1 h 2 min"]


def test_the_table_shows_scores_and_what_differs(tmp_path):
    one = make(tmp_path / "one")
    two = make(tmp_path / "two", lr=3e-3, epochs=2.0, scored=False)
    text = compare.table([compare.read(one), compare.read(two)])
    head, first, second, _, differs, *keys = text.splitlines()
    assert head.split()[:3] == ["run", "ranks", "epochs"]
    assert first.split() == [
        *(str(one), "6", "3.00", "0.01333", "640.0", "3", "min", "0.9912", "0.960", "0.980", "-")
    ]
    assert second.split()[-4:] == ["-"] * 4
    assert differs.startswith("what differs")
    assert [line.split() for line in keys] == [["train.optimizer.lr", "0.001", "0.003"]]


def test_the_command_writes_a_picture(tmp_path, capsys):
    runs = [str(make(tmp_path / name, lr=lr)) for name, lr in (("a", 1e-3), ("b", 2e-3))]
    target = tmp_path / "curves.png"
    assert cli.main(["compare", *runs, "--to", str(target)]) == 0
    assert target.read_bytes().startswith(b"\x89PNG")
    assert f"curves: {target}" in capsys.readouterr().out
    assert cli.main(["status", runs[0]]) == 0
    assert cli.main(["compare", str(tmp_path)]) == 2


def test_a_foreign_report_is_a_users_mistake(tmp_path):
    run = make(tmp_path / "run")
    (run / "report" / "metrics.json").write_text(yaml.safe_dump({"other": 1}))
    with pytest.raises(UserError, match="is no report"):
        compare.read(run)
