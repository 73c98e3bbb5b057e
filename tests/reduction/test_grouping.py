"""Planners: every gradient once, in ready order, and `optimal` beaten by nothing."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemdl.config import build
from stemdl.errors import UserError
from stemdl.reduction.grouping import Gradient, Link, end_of_communication, limit, plan, schedule

PLANNERS = ["none", "layer", "equal:1", "equal:3", "bytes:1kB", "bytes:40B", "optimal"]


@st.composite
def gradients(draw, max_size=30):
    """Gradients whose ready times, scopes and list order are unrelated, with ties and empties."""
    count = draw(st.integers(0, max_size))
    times = st.one_of(st.integers(0, 5).map(float), st.floats(0, 50))
    return [
        Gradient(index, draw(st.sampled_from("abcd")), draw(st.integers(0, 400)), draw(times))
        for index in draw(st.permutations(range(count)))
    ]


links = st.builds(Link, alpha=st.floats(0, 20), beta=st.floats(0, 0.2))


def ordered_runs(items):
    """Every way to cut a sequence into contiguous runs."""
    for cuts in itertools.product([False, True], repeat=max(len(items) - 1, 0)):
        runs = [[items[0]]]
        for item, cut in zip(items[1:], cuts, strict=True):
            if cut:
                runs.append([])
            runs[-1].append(item)
        yield runs


def partitions(items):
    """Every partition of a set, as lists of lists."""
    if not items:
        yield []
        return
    first, *rest = items
    for partition in partitions(rest):
        yield [[first], *partition]
        for place in range(len(partition)):
            yield [*partition[:place], [first, *partition[place]], *partition[place + 1 :]]


@pytest.mark.parametrize("planner", PLANNERS)
@settings(max_examples=60, deadline=None)
@given(gradients(), links)
def test_groups_hold_every_gradient_once_and_none_is_empty(planner, found, link):
    groups = plan(planner, found, link)
    assert all(groups)
    assert sorted(itertools.chain(*groups)) == list(range(len(found)))


@pytest.mark.parametrize("planner", [each for each in PLANNERS if each != "layer"])
@settings(max_examples=60, deadline=None)
@given(gradients(), links)
def test_ready_order_is_kept(planner, found, link):
    ready = {gradient.index: gradient.ready for gradient in found}
    times = [ready[index] for index in itertools.chain(*plan(planner, found, link))]
    assert times == sorted(times)


@settings(max_examples=150, deadline=None)
@given(gradients(), links)
def test_optimal_is_never_worse_than_another_planner(found, link):
    best = end_of_communication(plan("optimal", found, link), found, link)
    for planner in PLANNERS:
        other = end_of_communication(plan(planner, found, link), found, link)
        assert best <= other * (1 + 1e-12) + 1e-12


@settings(max_examples=60, deadline=None)
@given(gradients(max_size=8).filter(bool), links)
def test_optimal_equals_the_best_of_all_runs(found, link):
    indices = [each.index for each in sorted(found, key=lambda each: (each.ready, each.index))]
    best = min(end_of_communication(runs, found, link) for runs in ordered_runs(indices))
    ours = end_of_communication(plan("optimal", found, link), found, link)
    assert ours == pytest.approx(best, rel=1e-12)


@settings(max_examples=15, deadline=None)
@given(gradients(max_size=5).filter(bool), links)
def test_no_grouping_or_order_at_all_beats_optimal(found, link):
    ours = end_of_communication(plan("optimal", found, link), found, link)
    for partition in partitions([gradient.index for gradient in found]):
        for order in itertools.permutations(partition):
            assert ours <= end_of_communication(list(order), found, link) * (1 + 1e-12) + 1e-12


@settings(max_examples=100, deadline=None)
@given(gradients().filter(bool), links)
def test_fusion_forms_a_grouping_that_never_beats_optimal(found, link):
    best = end_of_communication(plan("optimal", found, link), found, link)
    for planner in PLANNERS:
        fused = schedule(plan(planner, found, link), found, link, fused=True)
        sent = [index for transfer in fused for index in transfer.group]
        assert sorted(sent) == sorted(each.index for each in found)
        assert best <= fused[-1].end * (1 + 1e-12) + 1e-12
        assert fused == schedule([each.group for each in fused], found, link)


@settings(max_examples=100, deadline=None)
@given(gradients().filter(bool), links)
def test_no_grouping_undercuts_the_limit_and_fusion_takes_at_most_twice_the_best(found, link):
    best = end_of_communication(plan("optimal", found, link), found, link)
    assert limit(found, link) <= best * (1 + 1e-12) + 1e-12
    fused = schedule(plan("none", found, link), found, link, fused=True)
    assert fused[-1].end <= 2 * best * (1 + 1e-12) + 1e-12


def test_optimal_plans_2000_gradients_in_well_under_a_second():
    rng = np.random.default_rng(0)
    found = [
        Gradient(i, str(i // 2), int(size), float(ready))
        for i, (size, ready) in enumerate(
            zip(rng.integers(100, 100_000, 2000), rng.uniform(0, 0.1, 2000), strict=True)
        )
    ]
    start = time.perf_counter()
    groups = plan("optimal", found, Link(1e-4, 1e-9))
    assert time.perf_counter() - start < 0.5
    assert 1 < len(groups) < 2000


def test_costly_groups_travel_together_and_cheap_ones_apart():
    found = [Gradient(i, "s", 100, float(i)) for i in range(6)]
    assert plan("optimal", found, Link(alpha=1e3, beta=0)) == [[0, 1, 2, 3, 4, 5]]
    assert plan("optimal", found, Link(alpha=0, beta=1e-2)) == [[i] for i in range(6)]


def test_layer_sends_scopes_when_their_last_gradient_is_ready():
    found = [
        Gradient(0, "first", 1, 5.0),
        Gradient(1, "first", 1, 3.0),
        Gradient(2, "second", 1, 4.0),
        Gradient(3, "third", 1, 1.0),
    ]
    assert plan("layer", found) == [[3], [2], [1, 0]]


def test_equal_and_bytes_cut_by_size():
    found = [Gradient(i, "s", size, float(i)) for i, size in enumerate([10, 10, 10, 10, 200, 10])]
    assert plan("bytes:25B", found) == [[0, 1], [2, 3], [4], [5]]
    assert plan("bytes:0.25kB", found) == [[0, 1, 2, 3, 4, 5]]
    uniform = [Gradient(i, "s", 7, float(i)) for i in range(12)]
    assert [len(group) for group in plan("equal:4", uniform)] == [3, 3, 3, 3]
    assert plan("equal:100", uniform) == [[i] for i in range(12)]


def test_schedule_waits_for_readiness_and_for_the_group_before():
    found = [Gradient(0, "s", 10, 1.0), Gradient(1, "s", 20, 1.5), Gradient(2, "s", 5, 9.0)]
    times = [(each.start, each.end) for each in schedule([[0], [1], [2]], found, Link(1.0, 0.1))]
    assert times == [(1.0, 3.0), (3.0, 6.0), (9.0, 10.5)]


def test_fusion_joins_what_waits_for_the_network_and_pays_for_each_tensor():
    found = [Gradient(i, "s", 10, ready) for i, ready in enumerate([0.0, 1.0, 2.0, 20.0])]
    apart = [[0], [1], [2], [3]]
    fused = schedule(apart, found, Link(alpha=5.0, beta=0.1, gamma=0.5), fused=True)
    assert [each.group for each in fused] == [[0], [1, 2], [3]]
    assert [each.end for each in fused] == [6.0, 6.0 + 5 + 2 + 0.5, 26.0]


@pytest.mark.parametrize(
    "planner", ["", "layers", "equal", "equal:0", "equal:x", "bytes:25", "bytes:MB", "none:1"]
)
def test_an_unknown_planner_is_one_clear_line(planner):
    with pytest.raises(UserError, match=r"reduction.planner is .*wanted none, layer, optimal"):
        build({"reduction": {"planner": planner}}, "test.yaml")
    with pytest.raises(ValueError, match="unknown planner"):
        plan(planner, [])


@pytest.mark.parametrize("planner", [*PLANNERS, "bytes:1.5GiB", "bytes:25MB"])
def test_the_experiment_file_takes_every_planner(planner):
    assert build({"reduction": {"planner": planner}}, "test.yaml").reduction.planner == planner


def test_optimal_without_a_link_says_what_is_missing():
    with pytest.raises(UserError, match="needs the cost of a reduction"):
        plan("optimal", [Gradient(0, "s", 1, 0.0)])
