"""Machine files and the cost of an allreduce."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from stemdl.errors import UserError
from stemdl.scaling.machine import QUANTITIES, allreduce, load

MACHINES = Path(__file__).parents[2] / "configs" / "machines"
SUMMIT, _ = load(MACHINES / "summit.yaml")
CHOICES = [(across, levels) for across in ("ring", "tree") for levels in (True, False)]


@pytest.mark.parametrize("path", sorted(MACHINES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_machine_file_loads_and_gives_each_number_an_origin(path):
    machine, description = load(path)
    assert machine.nodes > 0
    assert set(description.rates) == set(QUANTITIES)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda tree: tree["rates"].pop("message"), "found no message"),
        (lambda tree: tree["rates"].update(speed=tree["rates"]["message"]), "found unknown speed"),
        (lambda tree: tree["rates"]["message"].pop("source"), r"message\.source"),
        (lambda tree: tree["rates"]["message"].update(kind="guessed"), "found 'guessed'"),
        (lambda tree: tree["rates"]["message"].update(value=-1), "found -1"),
        (lambda tree: tree.update(node=3), "found 3"),
    ],
)
def test_a_wrong_machine_file_is_one_clear_line(tmp_path, change, wanted):
    tree = yaml.safe_load((MACHINES / "summit.yaml").read_text())
    change(tree)
    path = tmp_path / "machine.yaml"
    path.write_text(yaml.safe_dump(tree))
    with pytest.raises(UserError, match=wanted) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_machine_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"none\.yaml: cannot be read"):
        load(tmp_path / "none.yaml")


def test_one_rank_has_nothing_to_reduce():
    assert allreduce(SUMMIT, 1, 1e9) == 0


def test_a_ring_moves_twice_the_bytes_through_the_slowest_link():
    ideal = replace(SUMMIT, link_latency=0, network_latency=0, network_use=1)
    size = 1e9
    in_node = allreduce(ideal, 6, size, across="ring")
    assert in_node == pytest.approx(2 * 5 / 6 * size / ideal.link_bandwidth)
    across = allreduce(ideal, 27_600, size, across="ring", hierarchical=False)
    assert across == pytest.approx(2 * size / ideal.node_bandwidth, rel=1e-3)
    both = allreduce(ideal, 27_600, size)
    assert both == pytest.approx(in_node + across, rel=1e-3)


def test_a_trees_latency_grows_with_the_logarithm():
    one, many = (allreduce(SUMMIT, 6 * nodes, 0.0) for nodes in (16, 4096))
    in_node = allreduce(SUMMIT, 6, 0.0)
    assert (many - in_node) / (one - in_node) == pytest.approx(12 / 4)


@pytest.mark.parametrize(("across", "hierarchical"), CHOICES)
@settings(max_examples=40, deadline=None)
@given(ranks=st.integers(2, 4600), size=st.floats(0, 1e9), more=st.floats(1, 1e9))
def test_more_bytes_take_longer_and_more_nodes_are_not_quicker(
    across, hierarchical, ranks, size, more
):
    options = {"across": across, "hierarchical": hierarchical}
    time = allreduce(SUMMIT, ranks, size, **options)
    assert allreduce(SUMMIT, ranks, size + more, **options) > time
    assert allreduce(SUMMIT, 6 * ranks, size, **options) >= time
