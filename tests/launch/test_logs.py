"""Many ranks, few lines."""

import logging
import warnings

from stemdl import logs
from stemdl.ranks import Ranks
from stemdl.training import stragglers
from stemdl.training.stragglers import Effort


def test_ranks_that_say_alike_are_one_line():
    said = [(rank, f"n{rank // 6}", f"shard {rank}.h5 was slow") for rank in range(17, 329)]
    said.append((400, "n66", "disk is nearly full"))
    assert logs.aggregate(said) == [
        "312 ranks (first: rank 17 on n2): shard 17.h5 was slow",
        "rank 400 on n66: disk is nearly full",
    ]


def test_warnings_are_collected_told_once_and_let_go(capsys):
    with logs.listening(Ranks()) as collected:
        warnings.warn("too hot", stacklevel=1)
        logging.getLogger("h5py").warning("slow\nread")
        logging.getLogger("h5py").info("not worth a line")
        collected.tell()
        collected.tell()
    logging.getLogger("h5py").warning("after the end")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert "too hot" in lines[0]
    assert lines[1].endswith("slow read")
    assert lines[1].startswith("warning: rank 0 on ")


def test_a_flood_of_warnings_is_bounded():
    collected = logs.Warnings(Ranks())
    for number in range(10 * logs.MOST):
        collected.emit(logging.makeLogRecord({"msg": f"{number}"}))
    assert len(collected._said) == logs.MOST


def test_node_logs_on_request(tmp_path, monkeypatch):
    monkeypatch.setenv("STEMDL_NODE_LOGS", str(tmp_path / "logs"))
    with logs.listening(Ranks(rank=5, size=6)):
        logging.getLogger("stemdl").warning("late")
    (path,) = (tmp_path / "logs").glob("*.log")
    assert "rank 5 WARNING stemdl: late" in path.read_text()


def test_stragglers_by_compute_and_by_data():
    efforts = [Effort(f"n{rank // 6}", 0.001, 0.1) for rank in range(24)]
    assert stragglers.report(efforts) == ["no stragglers among 24 ranks: compute within 0%"]
    efforts[13] = Effort("n2", 0.001, 0.15)
    efforts[20] = Effort("n3", 0.05, 0.1)
    compute, data = stragglers.report(efforts)
    assert compute == "1 slow by compute (median 100.0 ms a step): rank 13 on n2 150.0 ms"
    assert data == "1 slow by data wait (median 1.0 ms a step): rank 20 on n3 50.0 ms"


def test_only_the_slowest_are_named():
    efforts = [Effort("n", 0.0, 0.1 + 0.1 * (rank > 8)) for rank in range(14)]
    (line,) = stragglers.report(efforts)
    assert line.startswith("5 slow by compute")
    assert line.count("rank ") == stragglers.COUNT
    assert "rank 9 on n" in line


def test_a_rank_that_waits_least_is_the_slow_one():
    """Both ranks' steps last 0.3 s; what rank 1 does not wait, it computes."""

    class Pair:
        size = 2

        def collect(self, value):
            slow = stragglers.Efforts({"data": 0.0, "compute": 0.0, "reduction": 0.0})
            slow.count(10, 0.0)
            return [value, Effort("b", 0.0, 0.3)]

    efforts = stragglers.Efforts({"data": 0.0, "compute": 5.0, "reduction": 1.0})
    efforts.count(10, 2.0)
    # The clock's parts of this job: compute 1.5 s and the ranks' mean wait 1.5 s.
    (line,) = efforts.report({"data": 0.0, "compute": 6.5, "reduction": 2.5}, Pair())
    assert "rank 1 on b 300.0 ms" in line
    assert "rank 0" not in line
