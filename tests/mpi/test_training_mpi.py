"""Training on real Horovod ranks: equal to one rank, resumable to the bit, never hanging."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
import yaml
from conftest import run_ranks

from stemdl import schema
from stemdl.launch import local

pytestmark = pytest.mark.mpi

PLANNERS = ("none", "layer", "equal:3", "bytes:2kB", "optimal")


def train(experiment: Path, ranks: int, *overrides: str) -> subprocess.CompletedProcess[str]:
    return run_ranks(ranks, ["-m", "stemdl", "train", str(experiment), *overrides])


def start(experiment: Path, *overrides: str) -> subprocess.Popen[str]:
    """Two ranks in the background."""
    command = [local.mpirun(), "-n", "2", sys.executable, "-m", "stemdl", "train"]
    return subprocess.Popen(
        [*command, str(experiment), *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def weights(run: Path, which: str = "last") -> list[np.ndarray]:
    with h5py.File(run / "checkpoints" / f"{which}.h5") as file:
        return [file["weights"][name][()] for name in sorted(file["weights"])]


def lines(run: Path) -> list[dict]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def losses(run: Path) -> list[tuple[str, int, float]]:
    return [(line["kind"], line["step"], line["loss"]) for line in lines(run)]


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not any(line["step"] >= step for line in lines(run)):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no step was logged within a minute"
        time.sleep(0.05)


def rank_processes(launcher: int) -> list[int]:
    """Process ids of the Python ranks below an mpirun."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
                parents = _ancestors(int(entry.name))
            except (OSError, ValueError):
                continue
            if launcher in parents and command[0] == sys.executable.encode():
                found.append(int(entry.name))
    return sorted(found)


def _ancestors(process: int) -> list[int]:
    found = []
    while process > 1:
        stat = Path(f"/proc/{process}/stat").read_text()
        process = int(stat.rsplit(")", 1)[1].split()[1])
        found.append(process)
    return found


SEVERAL = """
import json, sys
from stemdl import command, config, ranks
from stemdl.training import trainer

def main():
    for overrides in json.loads(sys.argv[2]):
        trainer.train(config.load(sys.argv[1], overrides), ranks.discover())
    return 0

sys.exit(command.run(main))
"""


def test_two_ranks_equal_one_rank_with_twice_the_batch(tiny_experiment, tmp_path):
    """With every planner, fp32 on the wire: equal weights, but for rounding, after 20 steps."""
    script = tmp_path / "several.py"
    script.write_text(SEVERAL)
    common = ["train.epochs=5", "train.validate_every=5", "train.optimizer.lr=2e-3"]
    two = [
        [*common, "train.batch=3", f"reduction.planner={planner}", f"run={tmp_path}/{planner}"]
        for planner in PLANNERS
    ]
    one = [[*common, "train.batch=6", f"run={tmp_path}/one"]]
    start = [[*one[0], "train.epochs=1", "train.optimizer.lr=1e-30", f"run={tmp_path}/start"]]
    for ranks, runs in ((2, two), (1, one + start)):
        done = run_ranks(ranks, [str(script), str(tiny_experiment), json.dumps(runs)])
        assert done.returncode == 0, done.stderr
    assert lines(tmp_path / PLANNERS[0])[-1]["step"] == 20
    before, wanted = weights(tmp_path / "start"), weights(tmp_path / "one")
    moved = max(np.abs(new - old).max() for new, old in zip(wanted, before, strict=True))
    for planner in PLANNERS:
        found = weights(tmp_path / planner)
        apart = max(np.abs(new - old).max() for new, old in zip(found, wanted, strict=True))
        assert apart < 2e-3 * moved, planner


def test_a_run_leaves_what_the_contract_says(tiny_experiment, tmp_path):
    done = train(tiny_experiment, 2, "train.ema=0.9", "train.accumulate=3")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    resolved = yaml.safe_load((run / "config.yaml").read_text())
    assert schema.Experiment.model_validate(resolved).train.accumulate == 3
    found = lines(run)
    assert [line["step"] for line in found if line["kind"] == "train"] == list(range(1, 13))
    assert [line["step"] for line in found if line["kind"] == "dev"] == [4, 8, 12]
    assert found[-1]["loss"] < found[0]["loss"]
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"best.h5", "last.h5"}
    assert list((run / "tensorboard").iterdir())
    log = (run / "mlperf.log").read_text()
    assert all(key in log for key in ("run_start", "epoch_stop", "eval_accuracy", "run_stop"))
    assert "samples/s" in done.stdout.splitlines()[-1]
    assert all(phase in done.stdout for phase in ("data", "compute", "reduction", "checkpoint"))
    again = train(tiny_experiment, 2, "train.ema=0.9", "train.accumulate=3")
    assert again.returncode == 0, again.stderr
    assert lines(run) == found


def test_a_signal_checkpoints_and_the_resumed_run_is_the_unbroken_one(tiny_experiment, tmp_path):
    # Ranks compare notes at steps that at most double: a signal at step 20 is heard by step 128.
    common = (
        "train.epochs=60",
        "train.validate_every=15",
        "train.log_every=20",
        "data.noise=0.1",
        "network.dropout=0.1",
        "train.ema=0.9",
    )
    whole = train(tiny_experiment, 2, *common, f"run={tmp_path}/whole")
    assert whole.returncode == 0, whole.stderr

    broken = tmp_path / "broken"
    process = start(tiny_experiment, *common, f"run={broken}")
    wait_for_step(broken, 20, process)
    os.kill(rank_processes(process.pid)[1], signal.SIGUSR1)  # one rank only
    output, _ = process.communicate(timeout=60)
    assert "stopped by SIGUSR1" in output
    assert process.returncode == 75, output
    assert lines(broken)[-1]["step"] < 240
    resumed = train(tiny_experiment, 2, *common, f"run={broken}")
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming at step" in resumed.stdout

    for which in ("last", "best"):
        for left, right in zip(
            weights(tmp_path / "whole", which), weights(broken, which), strict=True
        ):
            np.testing.assert_array_equal(left, right)
    assert losses(broken) == losses(tmp_path / "whole")
    assert len(losses(broken)) == 12 + 4


def test_the_wall_clock_budget_stops_a_run_in_time(tiny_experiment, tmp_path):
    began = time.monotonic()
    done = train(tiny_experiment, 1, "train.epochs=100000", "train.wall_limit=12")
    assert done.returncode == 75, done.stderr
    assert "stopped by train.wall_limit (12 s)" in done.stdout
    assert time.monotonic() - began < 40
    assert (tmp_path / "run/checkpoints/last.h5").exists()


def test_killing_a_rank_stops_the_other_and_the_run_resumes(tiny_experiment, tmp_path):
    run = tmp_path / "run"
    overrides = ("train.epochs=100000", "train.checkpoint_every=0.01")
    process = start(tiny_experiment, *overrides)
    wait_for_step(run, 20, process)
    os.kill(rank_processes(process.pid)[1], signal.SIGKILL)
    began = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - began < 60
    assert process.returncode not in (0, 2)
    assert "Killed (signal 9)" in output
    assert rank_processes(process.pid) == []
    resumed = train(tiny_experiment, 2, "train.epochs=100000", "train.wall_limit=15")
    assert "resuming at step" in resumed.stdout, resumed.stderr
    assert resumed.returncode == 75


def test_a_rank_whose_partner_hangs_stops_by_itself_with_a_message(tiny_experiment, tmp_path):
    overrides = ("train.epochs=100000", "train.stall_limit=15")
    process = start(tiny_experiment, *overrides)
    wait_for_step(tmp_path / "run", 4, process)
    os.kill(rank_processes(process.pid)[1], signal.SIGSTOP)
    output, _ = process.communicate(timeout=60)
    assert "another rank is probably gone" in output
    assert "resume from the last checkpoint" in output
    assert process.returncode != 0


def copied(tiny_data: Path, tmp_path: Path) -> Path:
    (tmp_path / "bad").mkdir()
    return Path(shutil.copytree(tiny_data, tmp_path / "bad" / "data"))


def truncate(data: Path) -> None:
    path = data / "train/00000.h5"
    path.write_bytes(path.read_bytes()[:-4096])


def reshape(data: Path) -> None:
    with h5py.File(data / "train/00001.h5", "r+") as file:
        values = file["cbed"][..., :5]
        del file["cbed"]
        file["cbed"] = values


def spoil(data: Path) -> None:
    with h5py.File(data / "train/00001.h5", "r+") as file:
        file["cbed"][3, 1, 2, 3, 4] = np.nan


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncate, "train/00000.h5"),
        (reshape, "train/00001.h5"),
        (spoil, "train/00001.h5"),
        (lambda data: shutil.rmtree(data), "bad/data"),
    ],
    ids=["truncated", "shape", "nan", "missing"],
)
def test_damaged_data_is_one_line_on_all_ranks(tiny_experiment, tiny_data, tmp_path, damage, said):
    data = copied(tiny_data, tmp_path)
    damage(data)
    assert_refused(train(tiny_experiment, 2, f"data.dir={data}"), said)


def assert_refused(done: subprocess.CompletedProcess[str], said: str) -> None:
    """Exit code 2 and one line of ours on stderr that says `said`."""
    assert done.returncode == 2, done.stderr
    ours = [line for line in done.stderr.splitlines() if line.startswith("stemdl:")]
    assert len(ours) == 1, done.stderr
    assert said in ours[0]
    assert "Traceback" not in done.stderr


def test_mistakes_in_the_experiment_are_one_line_on_all_ranks(tiny_experiment, tmp_path):
    assert_refused(train(tmp_path / "none.yaml", 2), "none.yaml: cannot be read")
    assert_refused(train(tiny_experiment, 2, "train.bach=3"), "did you mean 'train.batch'?")
    assert_refused(train(tiny_experiment, 2, "train.batch=13"), "24 training samples")


def test_a_checkpoint_of_another_network_is_refused(tiny_experiment):
    assert train(tiny_experiment, 1, "train.epochs=1").returncode == 0
    assert_refused(train(tiny_experiment, 2, "network.growth=5"), "holds another network")
    assert_refused(train(tiny_experiment, 2, "train.optimizer.name=sgd"), "does not fit")


def test_a_damaged_checkpoint_is_refused(tiny_experiment, tmp_path):
    assert train(tiny_experiment, 1, "train.epochs=1").returncode == 0
    path = tmp_path / "run/checkpoints/last.h5"
    path.write_bytes(path.read_bytes()[:2000])
    assert_refused(train(tiny_experiment, 2), "last.h5")
