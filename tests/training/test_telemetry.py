"""The clock adds up and the logs survive a kill."""

import json

import pytest

from stemdl.training.telemetry import PHASES, Clock, Recorder


def test_the_clock_goes_on_from_saved_totals_and_moves_parts():
    clock = Clock({"compute": 10.0})
    with clock.phase("compute"):
        pass
    assert clock.totals["compute"] > 10
    whole = sum(clock.totals.values())
    clock.move(4.0, "compute", "reduction")
    assert clock.totals["reduction"] == 4
    assert sum(clock.totals.values()) == pytest.approx(whole)
    assert all(phase in clock.split() for phase in PHASES)


def test_a_phase_counts_when_its_block_fails():
    clock = Clock()
    with pytest.raises(KeyError), clock.phase("data"):
        raise KeyError
    assert clock.totals["data"] > 0


def test_lines_after_the_resumed_step_and_torn_lines_are_dropped(tmp_path):
    first = Recorder(tmp_path, active=True, step=0)
    for step in (1, 2, 3):
        first.metrics("train", step, loss=1.0 / step)
    first.close()
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"kind": "train", "st')
    second = Recorder(tmp_path, active=True, step=2)
    second.metrics("train", 3, loss=9.0)
    second.close()
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in found] == [(1, 1.0), (2, 0.5), (3, 9.0)]


def test_other_ranks_write_nothing(tmp_path):
    silent = Recorder(tmp_path, active=False, step=0)
    silent.metrics("train", 1, loss=1.0)
    silent.start("run_start")
    silent.event("seed", 3)
    silent.close()
    assert list(tmp_path.iterdir()) == []


def test_the_mlperf_log_has_one_line_an_event(tmp_path):
    recorder = Recorder(tmp_path, active=True, step=0)
    recorder.start("run_start")
    recorder.event("global_batch_size", 8)
    recorder.end("run_stop", status="success")
    recorder.close()
    logged = (tmp_path / "mlperf.log").read_text().splitlines()
    events = [json.loads(line.split(":::MLLOG ")[1]) for line in logged]
    assert [event["key"] for event in events] == ["run_start", "global_batch_size", "run_stop"]
    assert events[1]["value"] == 8
    assert events[2]["metadata"]["status"] == "success"
