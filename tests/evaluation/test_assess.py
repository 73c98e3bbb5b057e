"""Samples judged whole: patterns, truth and atoms of phase objects that belong together."""

import numpy as np
import pytest
from phase_objects import write_phase_split

from stemdl.data import shards
from stemdl.errors import UserError
from stemdl.evaluation import assess, summary
from stemdl.evaluation.columns import Tally
from stemdl.ranks import Ranks
from stemdl.schema import Evaluate, Experiment

SETTINGS = Evaluate()


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    directory = tmp_path_factory.mktemp("phase")
    write_phase_split(directory, "test", 7)
    return shards.open_split(directory, "test")


@pytest.fixture(scope="module")
def rows(split):
    """The network's image is the truth with noise that grows with the index."""
    rng = np.random.default_rng(0)
    methods = assess.methods_for(split, SETTINGS, Ranks())
    found = []
    for index in range(split.count):
        case = assess.read(split, index)
        noise = rng.normal(0, case.truth.std(), case.truth.shape)
        noisy = case.truth + 0.1 * (1 + index) * noise
        found.append(assess.assess(case, assess.images(case, noisy, methods), SETTINGS))
    return found


def test_a_perfect_reconstruction_has_perfect_scores(split):
    case = assess.read(split, 2)
    row = assess.assess(case, assess.images(case, case.truth + 7, ("network",)), SETTINGS)
    result = row.results["network"]
    assert result.scores["pearson"] == pytest.approx(1)
    assert result.scores["mae"] == pytest.approx(0, abs=1e-5)
    columns = result.columns[SETTINGS.threshold].figures()
    assert columns["recall"] == columns["precision"] == 1
    assert columns["rms_pm"] == pytest.approx(0, abs=1e-3)
    atoms = result.atoms[SETTINGS.threshold].figures()
    assert atoms["recall"] == atoms["precision"] == 1 and atoms["true"] > 3
    assert atoms["rms_pm"] < 2
    assert row.ceiling.figures() == pytest.approx(atoms, rel=1e-9)


def test_baselines_lie_on_the_truth_and_nowhere_else(split, rows):
    """A mirrored or turned baseline would still be sharp, and wrong."""
    for key in ("icom", "adf"):
        for index, row in enumerate(rows):
            case = assess.read(split, index)
            image = assess.images(case, case.truth, (key,))[key]
            straight = row.results[key].scores["pearson"]
            assert straight > 0.6
            for turned in (image[::-1], image[:, ::-1], image[::-1, ::-1]):
                images = {key: turned}
                assert (
                    assess.assess(case, images, SETTINGS).results[key].scores["pearson"]
                    < straight - 0.2
                )


def test_baselines_are_fitted_in_volts_but_not_turned_round(split):
    case = assess.read(split, 0)
    inverted = assess.assess(case, {"icom": -3e-4 * case.truth + 8}, SETTINGS).results["icom"]
    assert inverted.scores["rmse"] == pytest.approx(0, abs=1e-6)
    assert inverted.scores["pearson"] == pytest.approx(-1)


def test_broken_reconstruction_names_the_sample(split):
    case = assess.read(split, 4)
    broken = case.truth.copy()
    broken[0, 0] = np.nan
    with pytest.raises(UserError, match=r"^sample 4: the reconstruction has NaN"):
        assess.assess(case, {"network": broken}, SETTINGS)


def test_methods_follow_the_settings_and_the_detector(split, monkeypatch):
    assert assess.methods_for(split, SETTINGS, Ranks()) == ("network", "icom", "adf")
    assert assess.methods_for(split, Evaluate(baselines=False), Ranks()) == ("network",)
    table = shards.read_table(split.shards[0])
    table["semi_angle"][3] = 80
    monkeypatch.setattr(shards, "read_table", lambda shard: table)
    assert assess.methods_for(split, SETTINGS, Ranks()) == ("network", "icom")


def test_a_baseline_gets_its_best_threshold_and_the_network_the_setting(rows):
    assert list(rows[0].results["network"].columns) == [SETTINGS.threshold]
    best = summary.best_threshold(rows, "adf")
    f1 = {
        each: summary.total(rows, "adf", "columns", each).f1 for each in assess.BASELINE_THRESHOLDS
    }
    assert f1[best] == max(f1.values()) > min(f1.values())


def test_examples_are_worst_median_and_best(rows):
    """Noise grows with the index, so correlation falls with it."""
    assert summary.choose(rows, 3) == {"worst": [6, 5, 4], "median": [4, 3, 2], "best": [0, 1, 2]}
    assert summary.choose(rows, 1) == {"worst": [6], "median": [3], "best": [0]}
    assert summary.choose(rows[:2], 3) == {"worst": [1, 0], "median": [1, 0], "best": [0, 1]}


def test_summary_is_over_samples_for_images_and_over_columns_for_columns(rows):
    figures = summary.summarise(rows, "network", SETTINGS.threshold)
    mae = [row.results["network"].scores["mae"] for row in rows]
    assert figures["mae"]["median"] == pytest.approx(np.median(mae))
    assert figures["mae"]["mean"] == pytest.approx(np.mean(mae))
    assert figures["mae"]["worst_tenth"] == sorted(mae)[5]  # of 7: the second worst
    pearson = [row.results["network"].scores["pearson"] for row in rows]
    assert figures["pearson"]["worst_tenth"] == sorted(pearson)[1]
    tallies = [row.results["network"].columns[SETTINGS.threshold] for row in rows]
    recovered, truths = sum(t.recovered for t in tallies), sum(t.truths for t in tallies)
    assert figures["columns"]["recall"] == pytest.approx(recovered / truths)
    assert figures["columns"]["true"] == truths
    assert isinstance(sum(tallies, Tally()), Tally)


def test_what_metrics_json_holds(rows):
    content = summary.collect(rows, Experiment(name="phase"))
    test = content["test"]
    assert (test["samples"], test["materials"], test["prototypes"]) == (7, 7, 3)
    assert sum(family["samples"] for family in test["families"]) == 7
    medians = [family["pearson"]["median"] for family in test["families"]]
    assert medians == sorted(medians)
    for figures in (test, content["baselines"]["icom"], content["baselines"]["adf"]):
        assert -1 <= figures["pearson"]["median"] <= 1
        for kind in ("columns", "atoms"):
            for key in ("recall", "precision", "rms_pm", "median_pm"):
                assert figures[kind][key] is not None
    assert test["ceiling"]["atoms"]["recall"] == 1
    assert summary.thresholds(content)["network"] == SETTINGS.threshold
