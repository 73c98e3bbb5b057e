"""Plans on one rank and by model: comparison, report, groups of a run, and the fit of the link."""

import itertools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from stemdl import config, files
from stemdl.ranks import Ranks
from stemdl.reduction import expected, link, plan, timeline
from stemdl.reduction.grouping import Gradient, Link
from stemdl.reduction.timeline import Rates

RATES = Rates(1e12, 1e11, 1e-6)
SMALL = {
    "network": {"layers": [1], "growth": 4, "initial_channels": 8, "bottleneck_layers": 1},
    "simulate": {"scan": [4, 4], "detector": [5, 5]},
    "train": {"batch": 2},
}


def experiment(**sections):
    return config.build(
        {key: SMALL.get(key, {}) | value for key, value in sections.items()}
        | {key: value for key, value in SMALL.items() if key not in sections},
        "test",
    )


def outlook(alpha=1e-4, beta=1e-9):
    gradients = [Gradient(i, f"l{i // 2}", 10**6 * (1 + i % 3), 1e-3 * (i + 1)) for i in range(20)]
    return plan.Outlook(gradients, 0.021, Link(alpha, beta), 4, "test")


def test_the_experiments_gradients_come_from_its_graph():
    found = expected.expect(experiment(), RATES)
    names = [gradient.scope for gradient in found.gradients]
    assert names[0] == "initial"
    assert names[-1] == "final"
    assert all(0 < gradient.ready <= found.compute for gradient in found.gradients)
    assert found.gradients[0].ready == found.compute  # back-propagation ends where the input is
    assert found.critical_path <= found.compute
    longer = found.lasting(2 * found.compute)
    assert longer.gradients[3].ready == pytest.approx(2 * found.gradients[3].ready)


def test_half_precision_on_the_wire_is_half_the_bytes():
    full, half = (
        expected.expect(experiment(reduction={"wire": wire}), RATES) for wire in ("fp32", "fp16")
    )
    assert [each.bytes for each in full.gradients] == [2 * each.bytes for each in half.gradients]


def test_accumulation_delays_the_gradients_by_the_earlier_micro_batches():
    once = expected.expect(experiment(), RATES)
    twice = expected.expect(experiment(train={"batch": 4, "accumulate": 2}), RATES)
    assert twice.compute == pytest.approx(2 * once.compute)
    wanted = [once.compute + gradient.ready for gradient in once.gradients]
    assert [gradient.ready for gradient in twice.gradients] == pytest.approx(wanted)
    assert twice.flops == 2 * once.flops


def test_optimal_is_the_quickest_and_no_planner_beats_the_bound():
    for case in (outlook(), outlook(alpha=1e-3), outlook(beta=1e-8), outlook(0.0, 0.0)):
        rows = {row["planner"]: row for row in plan.compare(case)}
        assert rows["optimal"]["step_s"] == min(row["step_s"] for row in rows.values())
        assert all(row["over_bound"] >= 1 - 1e-9 for row in rows.values())


def test_the_report_has_every_planner_and_the_chosen_one(tmp_path, capsys):
    chosen = experiment(reduction={"planner": "equal:7"}).model_copy(update={"run": tmp_path})
    content = plan.report(chosen, outlook())
    assert files.read_json(tmp_path / "plan" / "plan.json", plan.SCHEMA)["link"]["alpha"] == 1e-4
    assert (tmp_path / "plan" / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert [row["planner"] for row in content["planners"]] == [*plan.PLANNERS, "equal:7"]
    assert re.search(r"^equal:7 +7 .*<- reduction.planner$", capsys.readouterr().out, re.MULTILINE)


def test_groups_of_a_run_are_in_reverse_order_and_cached_for_optimal(tmp_path):
    inputs = keras.Input((8, 8, 2))
    outputs = keras.layers.Conv2D(3, 3, padding="same")(
        keras.layers.Conv2D(2, 3, padding="same")(inputs)
    )
    model, shapes = keras.Model(inputs, outputs), ((8, 8, 2), (8, 8, 3))

    def groups(planner):
        return plan.groups(
            model,
            shapes,
            experiment(reduction={"planner": planner}).model_copy(update={"run": tmp_path}),
            Ranks(),
        )

    assert groups("layer") == [[3, 2], [1, 0]]
    assert groups("none") == [[3], [2], [1], [0]]
    measured = groups("optimal")
    assert sorted(itertools.chain(*measured)) == [0, 1, 2, 3]
    kept = files.read_json(tmp_path / "groups.json", "stemdl.groups/1")
    assert kept["groups"] == measured
    other = kept | {"groups": [[0, 1, 2, 3]]}
    files.write_json(tmp_path / "groups.json", "stemdl.groups/1", other)
    assert groups("optimal") == [[0, 1, 2, 3]]  # what the run has, it keeps
    files.write_json(tmp_path / "groups.json", "stemdl.groups/1", other | {"ranks": 9})
    groups("optimal")  # measured again: the file was about other ranks
    assert files.read_json(tmp_path / "groups.json", "stemdl.groups/1")["ranks"] == 1


def test_one_rank_pays_nothing():
    assert link.measure(Ranks()) == Link(0.0, 0.0)


@pytest.mark.parametrize("alpha", [0.0, 3e-4])
@pytest.mark.parametrize("beta", [1e-9, 4e-8])
def test_the_fit_finds_the_line_through_noise(alpha, beta):
    rng = np.random.default_rng(0)
    exact = np.array([alpha + beta * size for size in link.SIZES])
    found = link.fit(link.SIZES, exact * rng.uniform(0.97, 1.03, len(exact)))
    assert found.beta == pytest.approx(beta, rel=0.1)
    assert found.alpha == pytest.approx(alpha, rel=0.1, abs=2e-6)


def test_a_sketch_is_timed_as_the_network_itself():
    from stemdl.network import layouts

    settings = experiment()
    shapes = expected.shapes(settings)
    model = layouts.build(settings.network, *shapes, seed=0)
    batch = [tf.TensorSpec((2, *shape), tf.float32) for shape in shapes]
    operations, outputs = timeline.trace(timeline.of_model(model, expected.difference), batch)
    real = timeline.predict(operations, outputs, RATES)
    sketched = expected.expect(settings, RATES)
    assert [gradient.ready for gradient in sketched.gradients] == pytest.approx(list(real.ready))
