"""The page, the pictures and the tables, from rows of results; then the commands on a small run."""

import csv
import io
import json
import re
import shutil

import h5py
import numpy as np
import pytest
from conftest import run_ranks
from matplotlib.image import imread
from phase_objects import write_phase_split

from stemdl import config, files
from stemdl.data import normalise, shards, trained_on
from stemdl.errors import UserError
from stemdl.evaluation import assess, curves, page, report, summary
from stemdl.ranks import Ranks
from stemdl.schema import Experiment


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Rows, content and pictures of a report on the phase objects."""
    folder = tmp_path_factory.mktemp("report")
    write_phase_split(folder / "data", "test", 7)
    split = shards.open_split(folder / "data", "test")
    experiment = Experiment(name="phase-objects", run=folder)
    settings, rng = experiment.evaluate, np.random.default_rng(0)
    methods = assess.methods_for(split, settings, Ranks())
    images = [
        case.truth + rng.normal(0, 3, case.truth.shape)
        for case in (assess.read(split, index) for index in range(split.count))
    ]
    rows = [report._row(split, i, image, methods, settings) for i, image in enumerate(images)]
    content = summary.collect(rows, experiment)
    examples = {
        name: [report._example(split, rows[i], images[i], content, settings) for i in those]
        for name, those in summary.choose(rows, 2).items()
    }
    log = folder / "metrics.jsonl"
    lines = [
        {"kind": kind, "step": step, "epoch": step / 10, "loss": 1 / step, "lr": 1e-3}
        for step in range(1, 30)
        for kind in ("train", "dev")
    ]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return rows, content, examples, log, folder


def test_page_holds_every_picture_and_the_figures_of_the_json(made):
    rows, content, examples, log, folder = made
    names = report.draw(folder, rows, content, examples, log)
    assert names[0] == "comparison.png" and names[-1] == "training.png" and len(names) == 7
    for name in names:
        picture = imread(folder / name)[..., :3]
        assert min(picture.shape[:2]) > 300
        assert picture.std() > 0.05  # something is drawn
    html = page.html(content, [folder / name for name in names])
    assert html.count("data:image/png;base64,") == len(names)
    assert not re.search(r"""(src|href)=["'](?!data:)""", html)  # self-contained
    network = content["test"]
    assert f"{network['pearson']['median']:.3f}" in html
    assert f"{100 * network['columns']['recall']:.1f}" in html
    assert f"{content['baselines']['icom']['mae']['median']:.2f}" in html
    for family in network["families"]:
        assert family["prototype"] in html


def test_training_log_may_be_gone_or_cut(tmp_path):
    log = tmp_path / "metrics.jsonl"
    assert report._training_lines(log) == []
    log.write_text('{"kind": "dev", "step": 1}\n{"kind": "tr')
    assert report._training_lines(log) == [{"kind": "dev", "step": 1}]


def test_terminal_table_marks_nothing_but_shows_all_methods(made):
    _, content, *_ = made
    text = page.text(content)
    head, *_ = text.splitlines()
    assert head == "test: 7 samples of 7 materials"
    line = next(each for each in text.splitlines() if "Pearson correlation, median" in each)
    values = [float(each) for each in line.split()[3:]]
    wanted = [content["test"], content["baselines"]["icom"], content["baselines"]["adf"]]
    assert values == [round(each["pearson"]["median"], 3) for each in wanted]


def test_best_is_the_lowest_error_and_the_highest_correlation(made):
    _, content, *_ = made
    by_label = {line.label: line for line in page.lines(content) if line.group == "Images"}
    assert by_label["Pearson correlation, median"].best == "network"
    assert by_label["MAE, median [V]"].best == "network"


def test_csv_has_a_row_for_each_sample(made):
    rows, content, *_ = made
    table = list(csv.DictReader(io.StringIO(page.samples_csv(rows, content))))
    assert [int(each["index"]) for each in table] == list(range(7))
    assert table[0]["zone_axis"] == "1 -1 0"
    for row, cells in zip(rows, table, strict=True):
        pearson = row.results["adf"].scores["pearson"]
        assert float(cells["adf_pearson"]) == pytest.approx(pearson, rel=1e-5)
    true = sum(int(cells["network_columns_true"]) for cells in table)
    assert true == content["test"]["columns"]["true"]


@pytest.fixture(scope="module")
def run(tiny_data, tmp_path_factory):
    """A run with a network of random weights: what evaluation needs, without training."""
    from stemdl.network import layouts
    from stemdl.training import checkpoint

    folder = tmp_path_factory.mktemp("runs") / "run"
    experiment = config.build(
        {
            "name": "random",
            "run": str(folder),
            "data": {"dir": str(tiny_data)},
            "network": {"initial_channels": 8, "growth": 4, "layers": [1], "bottleneck_layers": 1},
            "train": {"threads": 1},
        },
        "test",
    )
    split = shards.open_split(tiny_data, "test")
    shapes = (split.cbed_shape, split.potential_shape)
    model = layouts.build(experiment.network, *shapes, seed=1)
    for name in ("best", "last"):
        checkpoint.save(
            checkpoint.path(folder, name),
            checkpoint.Position(),
            {"weights": model.variables, "averages": []},
            checkpoint.signature(experiment, *shapes),
        )
    files.write_bytes(folder / "config.yaml", config.dump(experiment).encode())
    statistics = normalise.Normaliser(True, np.float32(1), np.float32(0.5), 20.0, 10.0)
    normalise.save(statistics, folder / "normalisation.npz")
    trained_on.save(trained_on.describe(split, statistics), folder)
    return folder


@pytest.fixture
def reconstruct(run):
    """What predict does with a file on one rank; `change` may spoil the network first."""
    from stemdl.evaluation import predict
    from stemdl.training import checkpoint

    model, normaliser, _ = checkpoint.load_model(run, "best")

    def call(path, change=lambda model: None):
        change(model)
        kind = trained_on.load(run)
        return predict._reconstruct_file(model, normaliser, kind, path, batch=4, ranks=Ranks())

    return call


@pytest.mark.mpi
def test_two_ranks_give_the_report_of_one(run, tmp_path):
    """More ranks than divide the 6 samples evenly would be 4; 2 share them 3 and 3."""
    reports = []
    for ranks in (1, 2):
        done = run_ranks(ranks, ["-m", "stemdl", "evaluate", str(run / "config.yaml")])
        assert done.returncode == 0, done.stderr
        assert "Pearson correlation, median" in done.stdout
        assert done.stdout.count(str(run / "report" / "report.html")) == 1
        reports.append(files.read_json(run / "report" / "metrics.json", report.SCHEMA))
    first, second = reports
    assert first["test"]["samples"] == second["test"]["samples"] == 6
    assert first["test"]["mae"] == pytest.approx(second["test"]["mae"], rel=1e-5)
    assert first["baselines"] == second["baselines"]
    assert "adf" not in first["baselines"]  # the tiny detector ends inside the disc
    assert "no dark field" in (run / "report" / "report.html").read_text()


@pytest.mark.mpi
def test_predict_gives_the_same_on_any_number_of_ranks(run, tiny_data, tmp_path):
    source, found = tiny_data / "test" / "00000.h5", []
    for ranks in (1, 4):  # 6 samples on 4 ranks: 1, 2, 1, 2
        to = tmp_path / f"{ranks}.h5"
        done = run_ranks(ranks, ["-m", "stemdl", "predict", str(run), str(source), "--to", str(to)])
        assert done.returncode == 0, done.stderr
        assert to.with_suffix(".png").stat().st_size > 0
        with h5py.File(to) as file:
            found.append(file["potential"][:])
            assert file.attrs["potential_pixel"] == pytest.approx(0.25)
    assert found[0].shape == (6, 8, 8) and found[0].dtype == np.float32
    np.testing.assert_allclose(found[0].mean((1, 2)), 0, atol=1e-4)
    np.testing.assert_allclose(found[1], found[0], atol=1e-4)
    assert found[0].std() > 0.1


def test_data_that_cannot_be_scored_is_one_line(run, tiny_data, tmp_path):
    """Measured data has no potential: evaluate refuses, predict works."""
    source = tmp_path / "data" / "test" / "00000.h5"
    source.parent.mkdir(parents=True)
    shutil.copy(tiny_data / "test" / "00000.h5", source)
    with h5py.File(source, "r+") as file:
        del file["potential"]
    arguments = ["-m", "stemdl", "evaluate", str(run / "config.yaml")]
    done = run_ranks(1, [*arguments, f"data.dir={tmp_path / 'data'}"])
    assert done.returncode == 2
    assert re.fullmatch(
        r"stemdl: .*data/test: holds no potential to compare with; .*predict.*\n",
        done.stderr.splitlines(keepends=True)[-1],
    )
    to = tmp_path / "found.h5"
    done = run_ranks(1, ["-m", "stemdl", "predict", str(run), str(source), "--to", str(to)])
    assert done.returncode == 0, done.stderr
    assert to.exists()


def test_predict_refuses_what_the_network_cannot_read(reconstruct, tmp_path):
    path = tmp_path / "measured.h5"

    def refusal(**datasets):
        with h5py.File(path, "w") as file:
            file.attrs["scan_step"] = 0.5
            for name, values in datasets.items():
                file[name] = values
        with pytest.raises(UserError) as caught:
            reconstruct(path)
        return str(caught.value).removeprefix(str(path))

    with pytest.raises(UserError, match=r"measured\.h5: cannot be read as HDF5"):
        reconstruct(path)
    assert "has no dataset 'cbed', found ['data']" in refusal(data=np.zeros(3))
    larger = refusal(cbed=np.ones((2, 4, 4, 8, 8), np.uint16))
    assert "cbed is (2, 4, 4, 8, 8), wanted (samples, 4, 4, 6, 6)" in larger
    broken = np.ones((3, 4, 4, 6, 6), np.float32)
    broken[2, 0, 0, 0, 0] = np.nan  # ReLU makes 0 of NaN: the output would look well
    assert "cbed of sample 2 holds NaN or infinity" in refusal(cbed=broken)


def test_predict_takes_a_single_scan_of_counts(reconstruct, tmp_path):
    path = tmp_path / "measured.h5"
    counts = np.arange(4 * 4 * 6 * 6, dtype=np.uint16).reshape(4, 4, 6, 6)
    with h5py.File(path, "w") as file:
        file["cbed"] = counts
    single = reconstruct(path)
    assert single.shape == (1, 8, 8)
    with h5py.File(path, "w") as file:
        file["cbed"] = np.stack([counts[::-1], counts])
    np.testing.assert_allclose(reconstruct(path)[1], single[0], rtol=1e-4, atol=1e-4)


def test_predict_refuses_a_network_that_gives_nan(reconstruct, tiny_data):
    def spoil(model):
        model.variables[-1].assign(np.full(model.variables[-1].shape, np.nan))

    with pytest.raises(UserError, match=r"the network gives NaN or infinity for sample 0"):
        reconstruct(tiny_data / "test" / "00000.h5", spoil)


def test_causes_that_nobody_knows_have_no_trend(tmp_path):
    """As of LMDB records, or of measured data."""
    records = [{"thickness": np.nan, "mean_z": 20.0 + n, "elements": 2} for n in range(4)]
    curves.trends(tmp_path / "trends.png", records, {"MAE [V]": np.arange(4.0)})
    assert (tmp_path / "trends.png").read_bytes().startswith(b"\x89PNG")
