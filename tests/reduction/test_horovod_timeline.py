"""Reports from timelines with known times, whole and cut off."""

import json

import pytest

from stemdl.errors import UserError
from stemdl.reduction.horovod_timeline import read, steps

MS = 1000  # the file counts in μs


def tensor(process, name, *trips):
    """Events of one tensor; a trip is (asked, agreed, reducing, reduced, done) [ms]."""
    events = [{"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}}]
    for asked, agreed, reducing, reduced, done in trips:
        spans = [
            ("B", "NEGOTIATE_ALLREDUCE", asked),
            ("X", "0", asked),
            ("E", None, agreed),
            ("B", "ALLREDUCE", agreed),
            ("B", "MEMCPY_IN_FUSION_BUFFER", agreed),
            ("E", None, reducing),
            ("B", "MPI_ALLREDUCE", reducing),
            ("E", None, reduced),
            ("E", None, done),
        ]
        for kind, label, time in spans:
            event = {"ph": kind, "ts": time * MS, "pid": process}
            events.append(event | ({"name": label} if label else {}))
    return events


def cycles(*times):
    return [{"ph": "i", "name": "CYCLE_START", "ts": time * MS, "s": "g"} for time in times]


def two_steps():
    """Two tensors fused in the first step and reduced one after the other in the second."""
    return [
        *cycles(*range(0, 140, 2)),
        *tensor(3, "statistics.0", (60, 61, 62, 63, 64)),
        *tensor(1, "gradients.0", (10, 12, 15, 25, 27), (110, 111, 112, 117, 118)),
        *tensor(2, "gradients.1", (11, 12, 15, 25, 28), (115, 118, 119, 129, 130)),
    ]


def test_times_of_each_step():
    first, second = steps(two_steps())
    assert first.tensors == second.tensors == 2
    assert first.operations == 1
    assert first.agreements == 1
    assert first.allreduce == pytest.approx(10e-3)
    assert first.negotiation == pytest.approx(1.5e-3)
    assert first.queue == pytest.approx(3e-3)
    assert first.exposed == pytest.approx((28 - 11) * 1e-3)
    assert second.operations == 2
    assert second.agreements == 2
    assert second.allreduce == pytest.approx(15e-3)
    assert second.exposed == pytest.approx((130 - 115) * 1e-3)
    assert second.cycles == pytest.approx((130 - 110) / 2, abs=1)


def test_a_step_that_began_before_the_file_is_left_out():
    events = [
        *tensor(1, "gradients.0", (110, 111, 112, 117, 118)),
        *tensor(2, "gradients.1", (15, 16, 17, 18, 19), (115, 118, 119, 129, 130)),
    ]
    (only,) = steps(events)
    assert only.exposed == pytest.approx(15e-3)


@pytest.mark.parametrize("lost", [20, 60, 200])
def test_unfinished_files_are_read_as_far_as_they_go(tmp_path, lost):
    text = json.dumps(two_steps(), separators=(",", ":"))
    path = tmp_path / "timeline.json"
    path.write_text(text[:-lost])  # the last reduction of the second step is cut
    assert len(steps(read(path))) == 1
    path.write_text(text[:-1] + ",\n")  # a job that still runs
    assert len(steps(read(path))) == 2


@pytest.mark.parametrize("text", ["", "{}", "nonsense"])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "timeline.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"timeline\.json: is not a timeline of Horovod"):
        read(path)
    with pytest.raises(UserError, match="cannot be read"):
        read(tmp_path / "none.json")


def test_nothing_reduced_is_no_step():
    assert steps(cycles(1, 2, 3)) == []
