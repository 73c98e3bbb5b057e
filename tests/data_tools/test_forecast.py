"""Dealing by cost, and what people are told before the work starts."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_tools import forecast
from data_tools.jobs import Job
from stemdl import schema

costs = st.lists(st.floats(1e-3, 1e5), min_size=1, max_size=60)


@given(costs, st.integers(1, 70), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_ranks_are_balanced_within_one_shard(seconds, ranks, workers):
    found = forecast.divide(np.array(seconds), workers, ranks)
    assert len(found.shares) == ranks
    assert sorted(job for share in found.shares for job in share) == list(range(len(seconds)))
    loads = [sum(seconds[job] for job in share) for share in found.shares]
    largest = max(seconds) + 1e-3
    assert max(loads) - min(loads) <= largest
    assert max(loads) <= sum(seconds) / ranks + largest * (1 - 1 / ranks)  # Graham 1969
    assert found.wall == pytest.approx(max(loads) / workers)
    assert found.workers == workers * ranks


def test_dealing_by_cost_beats_dealing_by_count():
    """Three thick samples among thin ones: by count, in turn, they would meet on one rank."""
    seconds = np.array([60.0, 1, 1, 60, 1, 1, 60, 1, 1])
    in_turn = max(seconds[rank::3].sum() for rank in range(3))
    assert in_turn == 180
    assert forecast.divide(seconds, 1, 3).wall == pytest.approx(62)


def test_dealing_for_the_largest_machine():
    """1,000,000 samples in 10,000 shards, costs unequal as thickness is, to 1,000 ranks."""
    seconds = np.random.default_rng(0).uniform(100, 400, 10_000)
    found = forecast.divide(seconds, 1, 1000)
    assert found.wall < 1.02 * seconds.sum() / 1000


def test_the_lines_add_up():
    wanted = schema.Simulate(scan=(2, 2), detector=(5, 5), scan_step=1, potential_pixel=0.5)
    jobs = [Job(Path(f"train/{n:05d}.h5"), "train", range(60)) for n in range(3)]
    said = forecast.lines(forecast.divide(np.full(3, 120.0), 1, 4), jobs, wanted)
    assert forecast.sample_bytes(wanted) == 2 * 2 * 5 * 5 * 2 + 4 * 4 * 4
    assert said[0] == "to make: 180 samples in 3 shards, 47.5 kB"
    assert "1,800.0 samples/hour a core, 2 s a sample" in said[1]
    assert "expected: 2 min on 4 processes, 75% of them busy" in said[2]
    assert "60 samples, 15.8 kB, up to 2 min of a core" in said[3]
    assert "930,000 samples, made like these: 516.7 core-hours, 245.5 MB" in said[4]
    assert "1 of 4 ranks have no shard to make" in said[5]
