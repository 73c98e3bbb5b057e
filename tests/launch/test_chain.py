"""A chain goes on while its jobs gain ground, and always ends."""

import json
import stat
from pathlib import Path

import h5py
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemdl import files
from stemdl.launch import chain, progress

STEPS_PER_EPOCH = 10


def save(run: Path, step: int) -> None:
    """A checkpoint at `step`, as far as a chain reads it."""
    path = run / "checkpoints" / "last.h5"
    path.parent.mkdir(parents=True, exist_ok=True)
    position = {"step": step, "steps_per_epoch": STEPS_PER_EPOCH, "ranks": 2}
    position |= {"best": None, "clock": {"compute": 1.0}}
    with h5py.File(path, "w") as file:
        file.attrs["position"] = json.dumps(position)


def job(run: Path, number: int, *, step: int | None, code: int | None, bad=()) -> bool:
    """One job of chain "c": it leaves a checkpoint at `step`; `code` None: it was killed.

    Returns whether it had anything to do.
    """
    if chain.begin(run, "c", str(number), seconds=100, scheduler="slurm") != 0:
        return False
    if step is not None:
        save(run, step)
    if code is not None:
        chain.end(run, "c", str(number), code=code, bad=bad)
    return True


def queue(run: Path, *jobs: str) -> None:
    files.write_json(run / chain.QUEUE, chain.QUEUE_SCHEMA, {"chain": "c", "jobs": list(jobs)})


@pytest.fixture
def scheduler(tmp_path, monkeypatch) -> Path:
    """scancel and scontrol that write down what they are asked; returns that file."""
    orders, folder = tmp_path / "orders", tmp_path / "bin"
    folder.mkdir()
    for name in ("scancel", "scontrol"):
        path = folder / name
        path.write_text(f'#!/bin/sh\necho {name} "$@" >> {orders}\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return orders


def test_jobs_that_gain_ground_go_on_to_the_end(tmp_path, scheduler):
    run = tmp_path / "run"
    queue(run, "1", "2", "3", "4")
    assert job(run, 1, step=10, code=75)
    assert job(run, 2, step=20, code=137)  # lost a rank after a checkpoint
    assert job(run, 3, step=30, code=0)
    assert chain.read(run)["state"] == "finished"
    assert scheduler.read_text() == "scancel 4\n"
    assert not job(run, 4, step=None, code=None)


def test_a_users_mistake_stops_it_at_once(tmp_path, scheduler):
    run = tmp_path / "run"
    queue(run, "1", "2", "3")
    assert job(run, 1, step=None, code=2)
    assert "mistake in the experiment" in chain.read(run)["reason"]
    assert scheduler.read_text() == "scancel 2 3\n"
    assert not job(run, 2, step=None, code=2)


@pytest.mark.parametrize("code", [1, 75, None])
def test_two_jobs_without_gain_stop_it(code, tmp_path, scheduler):
    """Also when they were killed before they could tell (None)."""
    run = tmp_path / "run"
    save(run, 10)
    assert job(run, 1, step=None, code=code)
    assert job(run, 2, step=None, code=code)
    assert not job(run, 3, step=None, code=code)
    assert chain.read(run)["state"] == "stopped"
    assert "2 jobs in a row" in chain.read(run)["reason"]


def test_one_job_without_gain_is_forgiven(tmp_path):
    run = tmp_path / "run"
    for number, step in enumerate((10, None, 20, None, 30)):
        assert job(run, number, step=step, code=1)
    assert chain.read(run)["state"] == "running"


def test_the_next_job_avoids_nodes_that_did_not_answer(tmp_path, scheduler):
    run = tmp_path / "run"
    queue(run, "1", "2", "3")
    job(run, 1, step=10, code=137, bad=["n7"])
    assert scheduler.read_text().splitlines() == [
        "scontrol update JobId=2 ExcNodeList=n7",
        "scontrol update JobId=3 ExcNodeList=n7",
    ]


def test_unwell_nodes():
    assert chain.unwell(["n1", "n2"], ["n1.site.org"]) == ["n2"]
    assert chain.unwell(["n1", "n2"], ["n1", "n2"]) == []
    assert chain.unwell(["n1", "n2"], []) == [], "the question failed, not the nodes"


def test_another_launch_begins_another_chain(tmp_path):
    run = tmp_path / "run"
    assert job(run, 1, step=10, code=0)
    assert chain.begin(run, "d", "2", seconds=1, scheduler="slurm") == 0
    assert [each["job"] for each in chain.read(run)["jobs"]] == ["2"]


def test_two_chains_do_not_work_on_one_run_at_the_same_time(tmp_path):
    run = tmp_path / "run"
    assert chain.begin(run, "c", "1", seconds=100, scheduler="slurm") == 0
    assert chain.at_work(run) == "1"
    assert chain.begin(run, "d", "2", seconds=100, scheduler="slurm") == chain.EXIT_NOTHING_LEFT
    chain.end(run, "c", "1", code=75, bad=[])
    assert chain.at_work(run) is None
    assert chain.begin(run, "d", "2", seconds=-1, scheduler="slurm") == 0
    assert chain.at_work(run) is None, "it is over its time: it was killed"


def test_a_refused_order_is_told_and_no_more(tmp_path, scheduler, capsys):
    (tmp_path / "bin" / "scancel").write_text("#!/bin/sh\necho not permitted >&2; exit 1\n")
    run = tmp_path / "run"
    queue(run, "1", "2")
    assert job(run, 1, step=10, code=0)
    assert "scancel 2: not permitted" in capsys.readouterr().out


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0, 1, 2, 75, 137, None]))))
def test_it_never_goes_on_after_an_end_nor_ends_while_it_gains(tmp_path_factory, jobs):
    run, step, barren, over = tmp_path_factory.mktemp("chain"), 0, 0, False
    for number, (gain, code) in enumerate(jobs):
        worked = job(run, number, step=(step := step + gain) or None, code=code)
        assert worked == (not over)
        if over:
            step -= gain
            continue
        barren = 0 if gain or code == 0 else barren + 1
        over = code in (0, 2) or barren >= chain.PATIENCE
    found = progress.last_checkpoint(run)
    assert (found.epochs if found else 0) == step / STEPS_PER_EPOCH
