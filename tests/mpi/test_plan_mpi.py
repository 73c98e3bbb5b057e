"""Plans measured on real Horovod ranks, and training with the measured groups."""

import json

import h5py
import numpy as np
import pytest
from conftest import run_ranks

pytestmark = pytest.mark.mpi


def test_a_measured_plan_has_the_cost_of_a_reduction(tiny_experiment, tmp_path):
    done = run_ranks(2, ["-m", "stemdl", "plan", str(tiny_experiment), "--measure"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("planner ") == 1  # one rank speaks
    content = json.loads((tmp_path / "run" / "plan" / "plan.json").read_text())
    assert content["ranks"] == 2
    assert content["link"]["alpha"] > 1e-5  # agreeing takes a part of Horovod's cycle
    assert content["link"]["beta"] > 0
    rows = {row["planner"]: row for row in content["planners"]}
    assert rows["optimal"]["step_s"] == min(row["step_s"] for row in rows.values())
    ready = [gradient["ready"] for gradient in content["gradients"]]
    assert len(ready) == 18
    assert min(ready) > 0


def test_optimal_groups_train_as_no_groups_and_stay_those_of_the_run(tiny_experiment, tmp_path):
    weights = {}
    for planner in ("none", "optimal"):
        arguments = ["-m", "stemdl", "train", str(tiny_experiment), f"reduction.planner={planner}"]
        done = run_ranks(2, [*arguments, f"run={tmp_path / planner}"])
        assert done.returncode == 0, done.stderr
        with h5py.File(tmp_path / planner / "checkpoints" / "last.h5") as file:
            weights[planner] = [file["weights"][name][()] for name in sorted(file["weights"])]
    for plain, grouped in zip(weights["none"], weights["optimal"], strict=True):
        np.testing.assert_allclose(plain, grouped, rtol=1e-4, atol=1e-6)
    kept = json.loads((tmp_path / "optimal" / "groups.json").read_text())
    assert sorted(index for group in kept["groups"] for index in group) == list(
        range(len(kept["bytes"]))
    )
    assert kept["ranks"] == 2


def test_a_profiled_run_reports_what_horovod_did(tiny_experiment, tmp_path):
    arguments = ["-m", "stemdl", "train", str(tiny_experiment), "train.profile_steps=3"]
    done = run_ranks(2, [*arguments, "reduction.planner=layer"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("profile of 3 steps: allreduce") == 1
    report = json.loads((tmp_path / "run" / "profile" / "reduction.json").read_text())
    assert len(report["steps"]) == 3
    for step in report["steps"]:
        assert 1 <= step["operations"] <= step["tensors"]
        assert 1 <= step["agreements"] <= step["cycles"]
        assert 0 < step["allreduce"] < 10
        assert step["exposed"] > 0
