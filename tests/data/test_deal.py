"""Dealing samples, files and ranks: each once, and evenly."""

import time

from hypothesis import given
from hypothesis import strategies as st

from stemdl.data import deal

counts = st.lists(st.integers(0, 30), min_size=1, max_size=20)
shares = st.lists(st.integers(1, 7), min_size=1, max_size=12)


def rows(parts):
    return [(shard, row) for part in parts for shard, low, high in part for row in range(low, high)]


@given(counts, shares)
def test_each_sample_is_dealt_once_and_in_proportion(counts, shares):
    parts = deal.samples(counts, shares)
    every = [(shard, row) for shard, count in enumerate(counts) for row in range(count)]
    assert rows(parts) == every
    for part, share in zip(parts, shares, strict=True):
        size = sum(high - low for _, low, high in part)
        assert abs(size - len(every) * share / sum(shares)) < 1
        assert all(high > low for _, low, high in part)


def test_a_million_samples_for_every_gpu_of_summit():
    begun = time.perf_counter()
    parts = deal.samples([100] * 10_000, [1] * 27_600)
    assert time.perf_counter() - begun < 5
    sizes = [sum(high - low for _, low, high in part) for part in parts]
    assert sum(sizes) == 1_000_000
    assert max(sizes) - min(sizes) <= 1
    assert max(map(len, parts)) <= 2  # a rank touches one shard, or two at a border


def test_more_parts_than_samples_and_one_sample():
    assert [len(part) for part in deal.samples([2], [1, 1, 1])] == [0, 1, 1]
    assert deal.samples([1], [5]) == [[(0, 0, 1)]]


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 8))
def test_lanes_hold_each_file_once_and_are_even(sizes, count):
    lanes = deal.lanes(sizes, count)
    assert sorted(item for lane in lanes for item in lane) == list(range(len(sizes)))
    loads = [sum(sizes[item] for item in lane) for lane in lanes]
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_nodes_of_ranks_placed_in_blocks_in_turns_and_in_containers():
    blocks = [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("b", 2)]
    assert deal.nodes(blocks) == [0, 0, 1, 1, 1]
    turns = [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert deal.nodes(turns) == [0, 1, 0, 1]
    containers = [("localhost", 0), ("localhost", 1), ("localhost", 0), ("localhost", 1)]
    assert deal.nodes(containers) == [0, 0, 1, 1]


def test_nodes_of_all_ranks_of_summit_in_any_placement():
    """In time for a start: a search through the nodes for each rank would take minutes."""
    nodes, each = 4600, 6
    blocks = [(f"node{rank // each}", rank % each) for rank in range(nodes * each)]
    assert deal.nodes(blocks) == [rank // each for rank in range(nodes * each)]
    turns = [(f"node{rank % nodes}", rank // nodes) for rank in range(nodes * each)]
    assert deal.nodes(turns) == [rank % nodes for rank in range(nodes * each)]
    names = [("localhost", rank % each) for rank in range(nodes * each)]
    assert deal.nodes(names) == [rank // each for rank in range(nodes * each)]
