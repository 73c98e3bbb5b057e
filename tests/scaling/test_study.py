"""The study of the paper's experiment, and of a small one from end to end."""

from dataclasses import replace
from pathlib import Path

import pytest

from stemdl import config, files
from stemdl.errors import UserError
from stemdl.scaling import study
from stemdl.scaling.machine import Published

ROOT = Path(__file__).parents[2]
SUMMIT = ROOT / "configs" / "machines" / "summit.yaml"


@pytest.fixture(scope="module")
def paper():
    """The paper's experiment on Summit: (study, description)."""
    experiment = config.load(
        ROOT / "configs" / "summit.yaml", [f"scale.machine={SUMMIT}", "scale.steps=3"]
    )
    return study.prepare(experiment)


def test_the_papers_step_moves_441_megabytes_and_computes_most_of_a_second(paper):
    job = paper[0].job
    assert sum(each.bytes for each in job.gradients) == pytest.approx(441e6, rel=0.01)
    assert job.compute == pytest.approx(5.15e13 / 55.8e12, rel=0.01)
    assert job.input_bytes == pytest.approx(1024 * 512 * 512 * 2, rel=0.01)


def test_published_results_are_met_by_fit_or_by_prediction(paper):
    prepared, description = paper
    tolerance = {None: 0.02, "message": 0.1, "global_use": 0.5}
    for result in description.published:
        assert prepared.predicted(result) == pytest.approx(
            result.value, abs=tolerance[result.fits]
        ), result
    assert [result.fits for result in description.published].count(None) == 1


def test_nothing_that_was_fitted_moves_the_held_out_figure(paper):
    prepared, description = paper
    held_out = next(each for each in description.published if each.fits is None)
    before = prepared.predicted(held_out)
    for name in ("message", "global_use"):
        changed = replace(prepared.machine, **{name: 3 * getattr(prepared.machine, name)})
        assert replace(prepared, machine=changed).predicted(held_out) == before


def test_fitted_values_in_the_file_are_those_that_the_study_finds(paper):
    prepared, description = paper
    for result in description.published:
        if result.fits is not None:
            in_file = description.rates[result.fits].value
            assert prepared.fitted(result) == pytest.approx(in_file, rel=0.05)


def test_the_original_horovod_collapses_by_negotiation(paper):
    prepared, _ = paper
    original = prepared.strategy("coordinator")
    assert prepared.efficiency(original, 96) > 0.9
    assert prepared.efficiency(original, 27_600) < 0.2
    assert prepared.bound(original, 27_600)[0] == "negotiation"
    assert prepared.bound(prepared.strategy("global input"), 27_600)[0] == "input"
    assert prepared.bound(prepared.strategy("flat ring"), 27_600)[0] == "bandwidth"
    assert prepared.bound(prepared.strategy("bitvector, layer"), 1)[0] == "compute"


def test_an_unknown_strategy_is_named(paper):
    result = Published(
        experiment="summit", ranks=6, strategy="magic", value=1.0, source="none of this kind"
    )
    with pytest.raises(UserError, match="no strategy 'magic'"):
        paper[0].predicted(result)


SMALL = {
    "network": {"layers": [1], "growth": 4, "initial_channels": 8, "bottleneck_layers": 1},
    "simulate": {"scan": [4, 4], "detector": [5, 5]},
    "scale": {"machine": str(SUMMIT), "ranks": [1, 12, 600], "steps": 2},
}


def test_a_small_study_writes_its_report_and_picture(tmp_path, capsys):
    experiment = config.build(SMALL | {"run": str(tmp_path)}, "test")
    report = study.scale(experiment)
    written = files.read_json(tmp_path / "scale" / "scale.json", study.SCHEMA)
    assert written["points"] == report["points"]
    assert len(report["points"]) == len(report["strategies"]) * 3
    assert all(point["efficiency"] > 0 for point in report["points"])
    assert all(0 <= part <= 1 for point in report["points"] for part in point["parts"].values())
    assert (tmp_path / "scale" / "scale.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "bitvector, optimal" in printed
    assert not report["published"]  # those are about another experiment


def test_more_ranks_than_the_machine_has_are_refused():
    tree = SMALL | {"scale": {"machine": str(SUMMIT), "ranks": [30_000]}}
    with pytest.raises(UserError, match=r"scale\.ranks goes to 30000, wanted at most 27600"):
        study.prepare(config.build(tree, "test"))
