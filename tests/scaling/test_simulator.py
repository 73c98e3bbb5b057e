"""One step on N ranks, against cases with known answers."""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemdl.reduction import grouping
from stemdl.reduction.grouping import Gradient
from stemdl.scaling.machine import load
from stemdl.scaling.simulator import Job, Strategy, link, simulate

SUMMIT, _ = load(Path(__file__).parents[2] / "configs" / "machines" / "summit.yaml")
UNIFORM = replace(SUMMIT, speed_spread=0, step_spread=0)
FREE = {"link_latency": 0, "network_latency": 0, "launch": 0, "message": 0}
INSTANT = replace(UNIFORM, **FREE, link_bandwidth=np.inf, node_bandwidth=np.inf)
LAYER = Strategy("layer", "bitvector", "layer")
COORDINATOR = Strategy("coordinator", "coordinator", "none")


def job(count=12, size=8_000_000, compute=0.6):
    """Equal gradients, ready in equal intervals over the second half of the step."""
    ready = np.linspace(compute / 2, compute, count)
    gradients = tuple(
        Gradient(index, f"layer_{index // 2}", size, float(time))
        for index, time in enumerate(ready)
    )
    return Job(gradients, compute, update=0.01, input_bytes=1e6)


def step(machine, strategy, ranks, work=None, seed=0):
    return simulate(machine, work or job(), strategy, ranks, np.random.default_rng(seed))


@pytest.mark.parametrize("strategy", [LAYER, COORDINATOR], ids=lambda strategy: strategy.name)
def test_one_rank_computes_and_updates(strategy):
    assert step(SUMMIT, strategy, 1).duration == pytest.approx(0.61)


@pytest.mark.parametrize("strategy", [LAYER, COORDINATOR], ids=lambda strategy: strategy.name)
def test_free_communication_costs_at_most_one_cycle(strategy):
    found = step(INSTANT, strategy, 27_600)
    assert 0.61 <= found.duration <= 0.61 + strategy.cycle


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["none", "layer", "equal:3", "bytes:20MB", "optimal"]),
    st.integers(2, 5000),
    st.integers(1_000, 400_000_000),
)
def test_without_cycles_and_noise_the_planners_model_is_exact(planner, ranks, size):
    """The alpha-beta model of grouping.py is the limit of the simulator."""
    strategy = Strategy("s", "bitvector", planner, hierarchical=False, cycle=1e-9, fusion=0)
    strategy = replace(strategy, group_fusion=False)
    work = job(size=size)
    gradients = list(work.gradients)
    cost = link(UNIFORM, strategy, ranks)
    groups = grouping.plan(planner, gradients, cost)
    wanted = max(grouping.end_of_communication(groups, gradients, cost), work.compute)
    found = step(UNIFORM, strategy, ranks, work).duration - work.update
    # The model charges each agreement in turn; the simulator agrees while it reduces.
    agreements = len(groups) * 30 * UNIFORM.network_latency
    assert wanted - agreements - 1e-6 <= found <= wanted + 1e-6


def test_the_coordinator_hears_every_rank_about_every_tensor():
    ranks, work = 3000, job()
    messages = ranks * len(work.gradients)
    quick, slow = (
        step(replace(INSTANT, message=cost), COORDINATOR, ranks, work) for cost in (0.0, 1e-4)
    )
    last_alone = work.compute + 1e-4 * ranks
    assert slow.duration >= last_alone
    assert slow.duration - quick.duration <= 1e-4 * messages + COORDINATOR.cycle


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 5000), st.integers(0, 5))
def test_the_bitvector_is_never_slower_than_the_coordinator(ranks, seed):
    bitvector = replace(COORDINATOR, coordination="bitvector")
    slack = 2 * COORDINATOR.cycle  # cycles may fall differently
    coordinator = step(SUMMIT, COORDINATOR, ranks, seed=seed).duration
    assert step(SUMMIT, bitvector, ranks, seed=seed).duration <= coordinator + slack


def test_the_slowest_rank_sets_the_pace():
    spread = replace(INSTANT, speed_spread=0.02)
    few, many = (
        np.mean([step(spread, LAYER, ranks, seed=seed).duration for seed in range(20)])
        for ranks in (2, 20_000)
    )
    # Expected largest of 20,000 normal numbers: 4.0 standard deviations.
    assert many == pytest.approx(0.6 * (1 + 4.0 * 0.02) + 0.01, rel=0.01)
    assert few < many


def test_fusion_joins_what_is_ready_together_up_to_the_buffer():
    together = Job(
        tuple(Gradient(index, "layer", 10_000_000, 0.5) for index in range(10)), 0.6, 0.0, 0.0
    )
    fused = Strategy("s", "bitvector", "none", fusion=25_000_000)
    assert step(UNIFORM, fused, 100, together).operations == 5
    assert step(UNIFORM, replace(fused, fusion=0), 100, together).operations == 10
    assert step(UNIFORM, replace(fused, planner="layer"), 100, together).operations == 1


def test_input_bounds_the_step_when_it_is_slower():
    work = replace(job(), input_bytes=500e6)
    everyone = replace(LAYER, global_input=True)
    wanted = 27_600 * 500e6 / (SUMMIT.global_read * SUMMIT.global_use)
    assert step(SUMMIT, everyone, 27_600, work).duration == pytest.approx(wanted)
    starved = replace(SUMMIT, local_read=1e9)
    assert step(starved, LAYER, 12, work).duration == pytest.approx(6 * 500e6 / 1e9)


def test_the_same_seed_gives_the_same_step():
    assert step(SUMMIT, LAYER, 600, seed=3) == step(SUMMIT, LAYER, 600, seed=3)
    assert step(SUMMIT, LAYER, 600, seed=3) != step(SUMMIT, LAYER, 600, seed=4)


def test_the_whole_of_summit_with_a_thousand_tensors_takes_seconds():
    work = job(count=1000, size=100_000)
    start = time.perf_counter()
    for strategy in (LAYER, COORDINATOR, replace(COORDINATOR, coordination="bitvector")):
        step(SUMMIT, strategy, 27_600, work)
    assert time.perf_counter() - start < 5
