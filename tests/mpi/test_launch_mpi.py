"""Whole jobs on real ranks: check, stage, train, signal, chain, evaluate."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
import yaml
from conftest import run_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))
import one_node_slurm
from lsf_standin import Lsf, wait_for

from stemdl import files
from stemdl.launch import chain, progress, status

pytestmark = pytest.mark.mpi
RANKS = 2
EPOCHS = 320  # of one step each: some seconds, so that a signal finds the run in the middle
SITE = "configs/sites/summit.yaml"


def overrides(path: Path) -> list[str]:
    """Overrides of the run that is interrupted, and of the one that is not."""
    return [
        f"run={path}",
        f"train.epochs={EPOCHS}",
        "train.validate_every=160",
        "train.log_every=1",
        "train.checkpoint_every=1",
        "evaluate.baselines=false",
    ]


@pytest.fixture(scope="module")
def experiment(tmp_path_factory, tiny_data) -> Path:
    tree = {
        "name": "tiny",
        "data": {"dir": str(tiny_data)},
        "network": {"initial_channels": 64, "growth": 32, "layers": [3], "bottleneck_layers": 1},
        "train": {"batch": 12, "threads": 1, "stall_limit": 60, "schedule": {"warmup": 0}},
        "reduction": {"stall_warning": 10, "stall_shutdown": 30},
    }
    path = tmp_path_factory.mktemp("experiment") / "tiny.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, experiment) -> Path:
    """RUN of one job that was never interrupted."""
    run = tmp_path_factory.mktemp("unbroken") / "run"
    arguments = ["-m", "stemdl", "train", str(experiment), *overrides(run)]
    done = run_ranks(RANKS, arguments, timeout=240)
    assert done.returncode == 0, done.stderr
    return run


def assert_same_state(one: Path, other: Path) -> None:
    """Weights, optimizer and averaged weights, bit for bit."""
    with h5py.File(one / "checkpoints/last.h5") as a, h5py.File(other / "checkpoints/last.h5") as b:
        assert set(a) == set(b)
        for part in a:
            assert len(a[part]) == len(b[part])
            for name in a[part]:
                np.testing.assert_array_equal(a[part][name][()], b[part][name][()])


def step_of(run: Path) -> int:
    lines = progress.metrics(run)
    return lines[-1]["step"] if lines else 0


def test_three_jobs_of_a_chain_end_where_one_long_job_does(experiment, unbroken, tmp_path):
    """Job 1 loses a rank, job 2 is warned of its limit, job 3 ends the run; job 4 is taken back."""
    lsf, run, scratch = Lsf(tmp_path / "lsf"), tmp_path / "run", tmp_path / "bb"
    launch = ["launch", str(experiment), *overrides(run)]
    launch += ["--on", "lsf", "--site", SITE, "--chain", "4", "--submit"]
    settings = {
        "account": "abc123",
        "environment.modules": "[]",
        "node.ranks": RANKS,
        "node.binding": "[{cores: 0-27, memory: 0}, {cores: 28-55, memory: 0}]",
        "node.local_dir": scratch,
        "mirror": 1,
    }
    launch += [word for item in settings.items() for word in ("--set", "{}={}".format(*item))]
    submitted = subprocess.run(
        [sys.executable, "-m", "stemdl", *launch],
        env=lsf.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert submitted.returncode == 0, submitted.stderr
    assert "submitted 101, 102, 103, 104" in submitted.stdout

    def lose_a_rank(job: subprocess.Popen[bytes]) -> None:
        wait_for(lambda: progress.last_checkpoint(run) is not None or ended(job), "a checkpoint")
        os.kill(lsf.task(1), signal.SIGKILL)

    def warn(job: subprocess.Popen[bytes]) -> None:
        before = step_of(run)
        wait_for(lambda: step_of(run) > before or ended(job), "progress")
        lsf.warn(job)

    def ended(job: subprocess.Popen[bytes]) -> bool:
        return job.poll() is not None

    _, code, log = lsf.run_next(during=lose_a_rank)
    assert code not in (0, 2, 75), log
    assert "job 102 goes on" in log
    lost_at = progress.last_checkpoint(run).step
    assert 0 < lost_at < step_of(unbroken)

    _, code, log = lsf.run_next(during=warn)
    assert code == 75, log
    assert "resuming at step" in log
    assert "stopped by SIGUSR1" in log
    stopped_at = progress.last_checkpoint(run).step
    assert lost_at < stopped_at < step_of(unbroken)
    assert "between jobs" in status.status(run)

    _, code, log = lsf.run_next()
    assert code == 0, log
    assert lsf.killed() == ["104"]
    assert "check: all is well" in log
    assert (run / "report" / "report.html").exists()
    assert chain.read(run)["state"] == "finished"
    assert f"finished: epoch {EPOCHS}.00 of {EPOCHS}" in status.status(run)
    assert not list(scratch.glob("*")), "the nodes' disks are left clean"
    assert_same_state(run, unbroken)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[dict[str, str]]:
    if absent := one_node_slurm.missing():
        pytest.skip(f"no Slurm here ({', '.join(absent)} missing): run scripts/install-slurm")
    with one_node_slurm.running(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


def test_a_chain_on_a_real_slurm(experiment, unbroken, slurm, tmp_path):
    """sbatch, srun and scancel of Slurm itself: job 1 is signalled, the next ends the run."""
    run = tmp_path / "run"
    site = tmp_path / "site.yaml"
    site.write_text(
        yaml.safe_dump(
            {
                "name": "one-node",
                "scheduler": "slurm",
                "queue": "batch",
                "minutes": 30,
                "step_options": ["--mpi=pmi2"],
                "node": {"ranks": RANKS, "cores": RANKS, "local_dir": str(tmp_path / "bb")},
            }
        )
    )

    def order(*words: str) -> str:
        done = subprocess.run(words, env=slurm, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def log(job: str) -> str:
        path = run / "logs" / f"{job}.log"
        return path.read_text() if path.exists() else ""

    launch = ["launch", str(experiment), *overrides(run), "--site", str(site)]
    order(sys.executable, "-m", "stemdl", *launch, "--chain", "4", "--submit")
    first, *others = files.read_json(run / chain.QUEUE, chain.QUEUE_SCHEMA)["jobs"]
    try:
        wait_for(lambda: step_of(run) > 0, "progress")
        order("scancel", "--signal=USR1", first)  # what --signal=USR1@300 does before the limit
        wait_for(lambda: "goes on" in log(first), "the end of job 1", timeout=300)
        assert "stopped by SIGUSR1" in log(first)
        assert 0 < progress.last_checkpoint(run).step < EPOCHS
        wait_for(
            lambda: not order("squeue", "--noheader", "--me").strip(),
            "the end of the chain",
            timeout=300,
        )
    except AssertionError as error:
        raise AssertionError("\n".join((str(error), *map(log, (first, *others))))) from error
    record = chain.read(run)
    assert record["state"] == "finished", "".join(map(log, others))
    assert "resuming at step" in log(others[0])
    # One would do; but what fails by chance in one job is made good by the next.
    worked = [each["job"] for each in record["jobs"]]
    assert all(log(job) == "" for job in others if job not in worked), "taken back before it began"
    assert_same_state(run, unbroken)


def test_ranks_that_srun_does_not_connect_are_refused(experiment, slurm, tmp_path):
    """srun --mpi=none starts two processes that each believe to be alone."""
    train = [sys.executable, "-m", "stemdl", "train", str(experiment), f"run={tmp_path / 'run'}"]
    done = subprocess.run(
        ["srun", "--ntasks=2", "--mpi=none", *train],
        env=slurm,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.count("stemdl: srun started 2 processes, but MPI (") == 1
    assert not (tmp_path / "run").exists()


def test_check_is_green_and_red(experiment, tmp_path):
    """Red: exit code 1, and one line for what all ranks find alike."""
    arguments = ["-m", "stemdl", "check", str(experiment), f"run={tmp_path / 'run'}"]
    good = run_ranks(RANKS, [*arguments, f"stage.dir={tmp_path / 'disk'}"])
    assert good.returncode == 0, good.stdout + good.stderr
    assert "2 ranks on 1 node" in good.stdout
    assert "RED" not in good.stdout
    assert "bus bandwidth" in good.stdout
    bad = run_ranks(RANKS, [*arguments, "data.dir=/nowhere"])
    assert bad.returncode == 1
    red = [line for line in bad.stdout.splitlines() if "RED" in line]
    assert len(red) == 1
    assert "2 ranks (first: rank 0 on" in red[0]
    assert "/nowhere: no such data directory" in red[0]
