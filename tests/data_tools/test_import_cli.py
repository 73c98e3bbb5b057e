"""The command: what users type, what they are told, and on to the network."""

from pathlib import Path

import foreign_files as foreign
import h5py
import numpy as np
import pytest
from conftest import run_ranks

from data_tools import cli
from stemdl.data import shards
from stemdl.errors import UserError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "scan.h5"
    with h5py.File(path, "w") as file:
        file["patterns"] = foreign.stored(("ky", "kx", "y", "x"), "float32")
    return path


def test_words_become_shards(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = source.parent / "data"
    words = (
        "--axes ky,kx,y,x --flip y,kx --scan-step 0.05nm --detector-step 0.5mrad --energy 100 "
        "--semi-angle 20 --origin 3,5 --rotation 180 --beam 2 --field 3,2 --overlap 1 --split dev "
        "--name mine --material SrTiO3 --key patterns"
    )
    assert cli.main(["import", str(source), "--to", str(data), *words.split()]) == 0
    shard = shards.open_split(data, "dev").shards[0]
    assert shard.path.name == "mine-00000.h5"
    arranged = np.rot90(np.flip(foreign.scan("float32"), (0, 3)), 2, (2, 3)) / 2
    found = shards.read_samples(shard, range(shard.count))["cbed"]
    assert np.array_equal(found, np.stack([arranged[:, x : x + 2] for x in range(4)]))
    assert shard.axes.scan_step == pytest.approx(0.5)
    assert shard.axes.detector_step == pytest.approx(0.5e-3 / 0.0370, rel=1e-3)
    (record, *_) = shards.read_table(shard)
    assert record["material"] == b"SrTiO3"
    assert (record["energy"], record["semi_angle"]) == (100, 20)
    shown = capsys.readouterr().out
    for line in (
        "axes          ky, kx, y, x  (--axes)",
        "scan_step     0.5 Å  (--scan-step)",
        "(--detector-step, 0.5 mrad at 100 keV)",
        "origin        3, 5 pixels  (--origin)",
        "fields: 4 of 3 x 2 probes",
        "dev/mine-00000.h5: written",
    ):
        assert line in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "scan.h5:/patterns: does not say its scan step; give --scan-step"),
        (["--scan-step", "0"], "--scan-step is '0', wanted more than 0"),
        (["--scan-step", "wide"], "--scan-step is 'wide', wanted a number or two"),
        (["--detector-step", "3nm"], "--detector-step is '3nm', wanted a number or two (y,x) in "),
        (["--energy", "-100"], "--energy is -100, wanted more than 0"),
        (["--rotation", "1,2"], "--rotation is '1,2', wanted a number"),
        (["--origin", "4"], "--origin is '4', wanted 2 numbers with a comma"),
        (["--axes", "y,x,ky"], "--axes is 'y,x,ky', wanted each of y,x,ky,kx once"),
        (["--flip", "z"], "--flip is 'z', wanted some of y,x,ky,kx"),
        (["--field", "3,2.5"], "--field is '3,2.5', wanted two whole numbers above 0"),
        (["--bin", "0"], "--bin is 0 and --overlap 0, wanted at least 1 and 0"),
        (["--match", "RUN", "--detector", "9,9"], "--detector goes without --match"),
        (["--match", "RUN"], "RUN/data.json: no such file; train first"),
        (["--key", "other"], "scan.h5: has no array 'other'; it has patterns (7, 11, 3, 5)"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    source: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    data = source.parent / "data"
    assert cli.main(["import", str(source), "--to", str(data), *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("stemdl: ") and said.count("\n") == 1
    assert message in said
    assert not data.exists()


@pytest.mark.mpi
def test_from_a_camera_file_to_a_potential(
    tmp_path: Path, tiny_experiment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Train on 4 x 4 probes every 0.5 Å and 6 x 6 pixels of 0.1 1/Å, then bring a .mib file."""
    run, scan = tmp_path / "run", tmp_path / "scan.mib"
    done = run_ranks(1, ["-m", "stemdl", "train", str(tiny_experiment), "train.epochs=1"])
    assert done.returncode == 0, done.stderr
    y, x, ky, kx = np.indices((9, 11, 28, 30))
    disc = 1 / (1 + np.exp(np.hypot(ky - 13.2, kx - 15.4) - 8))
    counts = np.random.default_rng(0).poisson(400 * disc * (1 + 0.3 * np.sin(y / 2 + x / 3)))
    foreign.write_mib(scan, counts.reshape(99, 28, 30).astype(np.uint16), per_trigger=11)
    words = ["--scan-step", "0.25", "--detector-step", "0.025", "--match", str(run)]
    assert cli.main(["import", str(scan), "--to", str(tmp_path / "data"), *words]) == 0
    shard = tmp_path / "data" / "test" / "scan-00000.h5"
    assert f"{shard}: written; next: stemdl predict {run} {shard}" in capsys.readouterr().out

    from stemdl.data import trained_on
    from stemdl.evaluation import predict
    from stemdl.ranks import Ranks
    from stemdl.training import checkpoint

    model, normaliser, _ = checkpoint.load_model(run, "best")
    kind = trained_on.load(run)

    def reconstruct(path: Path) -> np.ndarray:
        return predict._reconstruct_file(model, normaliser, kind, path, batch=4, ranks=Ranks())

    fields = reconstruct(shard)
    assert fields.shape == (4, 8, 8)  # two along y, two along x
    done = run_ranks(2, ["-m", "stemdl", "predict", str(run), str(shard)])
    assert done.returncode == 0, done.stderr
    to = shard.with_suffix(".potential.h5")
    assert f"predict: 4 reconstructions, joined to 1 scan in {to}" in done.stdout
    with h5py.File(to) as file:
        image = file["scan/000"]
        assert image.attrs["samples"].tolist() == [0, 1, 2, 3]
        # Fields begin 2 probes of the scan further along y, 4 along x: 1 and 2 of the network's.
        assert image.shape == (8 + 2, 8 + 4)
        corner = image[:2, :4] - fields[0, :2, :4]  # one field alone
        np.testing.assert_allclose(corner, corner[0, 0], atol=1e-4)
    with pytest.raises(UserError, match="stemdl-data import FILE --to DATA --match RUN"):
        reconstruct(scan)
    with h5py.File(shard, "r+") as file:
        file.attrs["scan_step"] = 0.3
    with pytest.raises(UserError, match=r"scan_step is 0\.3 Å, the network was trained on 0\.5"):
        reconstruct(shard)
