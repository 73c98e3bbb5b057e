"""Files become shards: fields, calibration, intensities, records, and nothing where it fails."""

import json
from pathlib import Path
from typing import Any

import foreign_files as foreign
import h5py
import numpy as np
import pytest
from numpy.typing import NDArray
from test_import_formats import write_abtem, write_olcf, write_records

from data_tools.importers import convert as converting
from data_tools.importers import fields as cutting
from data_tools.importers.calibration import Known, Quantity
from data_tools.importers.convert import convert
from data_tools.importers.fields import Wanted
from data_tools.importers.prepare import Wish
from data_tools.importers.scan import Given
from stemdl import files
from stemdl.data import manifest, shards, trained_on
from stemdl.data.shards import Axes
from stemdl.data.trained_on import TrainedOn
from stemdl.errors import UserError


def said(**known: Any) -> dict[str, Known]:
    units = {"scan_step": "Å", "detector_step": "1/Å"}
    return {
        name: Known(Quantity((value, value), units[name]) if name in units else value, "user")
        for name, value in known.items()
    }


def write(path: Path, patterns: NDArray, name: str = "scan") -> Path:
    with h5py.File(path, "w") as file:
        file[name] = patterns
    return path


def read_back(paths: list[Path]) -> tuple[NDArray, NDArray]:
    """All patterns and records of some shards, verified."""
    opened = [shards.open_shard(path) for path in paths]
    for path in paths:
        shards.verify(path)
    cbed = [shards.read_samples(shard, range(shard.count))["cbed"] for shard in opened]
    return np.concatenate(cbed), np.concatenate([shards.read_table(shard) for shard in opened])


def specimen(y: NDArray, x: NDArray, ky: NDArray, kx: NDArray) -> NDArray:
    """Density of counts at probe (y, x) [Å] and frequency (ky, kx) [1/Å]: a disc of 0.5 1/Å whose
    brightness and place follow the probe, without any symmetry.
    """
    ky, kx = ky - 0.06 * np.sin(y / 4), kx - 0.05 * np.cos(x / 5)
    rim = 1 / (1 + np.exp((np.hypot(ky, kx) - 0.5) / 0.04))
    return rim * (1 + 0.3 * np.sin(y / 3 + x / 4) + 0.2 * ky - 0.4 * kx) + 0.01


def measured(
    y: NDArray, x: NDArray, detector: tuple[int, int], sampling: float,
    origin: tuple[float, float], rotation: float = 0.0,
) -> NDArray:  # fmt: skip
    """Counts (y, x, ky, kx) of the specimen at probes y, x [Å], on a detector whose pixels are
    `sampling` [1/Å] wide and which is turned into the scan by `rotation`.
    """
    fine = round(sampling / 0.02)  # points to a pixel's side
    ky, kx = (
        ((np.arange(count * fine) + 0.5) / fine - 0.5 - at) * sampling
        for count, at in zip(detector, origin, strict=True)
    )
    ky, kx = np.meshgrid(ky, kx, indexing="ij")
    cos, sin = np.cos(np.deg2rad(rotation)), np.sin(np.deg2rad(rotation))
    y, x = y[:, None, None, None], x[None, :, None, None]
    points = specimen(y, x, cos * ky - sin * kx, sin * ky + cos * kx) * (sampling / fine) ** 2
    return points.reshape(y.size, x.size, detector[0], fine, detector[1], fine).sum((3, 5))


def probes(count: int, step: float) -> NDArray:
    return np.arange(count) * step


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that was trained on fields of 4 x 5 probes every 1 Å, 9 x 9 pixels of 0.16 1/Å."""
    kind = TrainedOn(
        cbed_shape=(4, 5, 9, 9),
        potential_shape=(16, 20),
        axes=Axes(1.0, 0.16, 0.25, 0.3),
        cbed_unit="fraction of the beam x detector pixels",
        intensity=81.0,
        energy=(100.0, 100.0),
        semi_angle=(20.0, 20.0),
    )
    trained_on.save(kind, tmp_path / "run")
    return tmp_path / "run"


# On a network's sampling


@pytest.mark.parametrize(
    ("step", "sampling", "detector", "origin", "rotation"),
    [
        (1.0, 0.16, (9, 9), (4.0, 4.0), 0.0),
        (0.5, 0.04, (45, 47), (22.3, 23.6), 0.0),
        (0.5, 0.04, (47, 45), (23.6, 21.8), 90.0),
        (0.8, 0.05, (46, 48), (22.0, 24.5), -33.0),
        (0.5, 0.04, (70, 64), (34.2, 31.0), 155.0),
    ],
)
def test_measured_patterns_become_those_of_the_training(
    tmp_path: Path, run: Path, step: float, sampling: float, detector: tuple[int, int],
    origin: tuple[float, float], rotation: float,
) -> None:  # fmt: skip
    y, x = probes(round(9 / step), step), probes(round(11 / step), step)
    counts = 1e4 * measured(y, x, detector, sampling, origin, rotation)
    path = write(tmp_path / "scan.h5", counts.astype(np.float32))
    calibration = said(scan_step=step, detector_step=sampling, rotation=rotation, origin=origin)
    made = convert(path, tmp_path / "data", Given(calibration=calibration), Wish(match=run))
    found, table = read_back(made)
    assert found.shape[1:] == (4, 5, 9, 9)
    shard = shards.open_shard(made[0])
    assert shard.axes == Axes(1.0, 0.16, 0.25, 0.3)
    assert shard.cbed_unit == "fraction of the beam x detector pixels"

    def trained(y: NDArray, x: NDArray) -> NDArray:
        return measured(y, x, (9, 9), 0.16, (4.0, 4.0))

    scale = 81 / trained(y, x).sum((2, 3)).mean()
    for patterns, (first_y, first_x) in zip(found, table["scan_start"], strict=True):
        wanted = scale * trained(y[first_y] + probes(4, 1), x[first_x] + probes(5, 1))
        assert patterns == pytest.approx(wanted, abs=0.05 * wanted.max())
        assert np.abs(patterns - wanted).mean() < 0.01 * wanted.max()


def test_the_beam_is_centred_when_nobody_says_where_it_is(tmp_path: Path, run: Path) -> None:
    found = []
    for number, origin in enumerate([(22.0, 23.0), (24.4, 21.3)]):
        counts = measured(probes(7, 0.5), probes(9, 0.5), (47, 47), 0.04, origin)
        path = write(tmp_path / f"scan{number}.h5", counts)
        given = Given(calibration=said(scan_step=0.5, detector_step=0.04))
        made = convert(path, tmp_path / f"data{number}", given, Wish(match=run))
        found.append(read_back(made)[0])
        provenance = json.loads(shards.open_shard(made[0]).provenance)
        assert any("bright-field disc of the mean of 63 pat" in line
                   for line in provenance["calibration"])  # fmt: skip
    assert found[1] == pytest.approx(found[0], abs=0.06 * float(found[0].max()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scan_step": 1.3}, "probe positions 1.3 Å apart are wanted every 1 Å"),
        ({"scan_step": 0.1}, "has 7 probe positions along an axis, a field needs 31"),
        ({"detector_step": 0.2}, "pixels of 0.2 1/Å along ky are wanted 0.16"),
        ({"detector_step": 0.01}, "reaches from -0.230 to 0.230 1/Å along ky, wanted -0.720"),
        ({"origin": (40.0, 23.0)}, "beyond what was measured"),
    ],
)
def test_extrapolation_is_refused_before_anything_is_written(
    tmp_path: Path, run: Path, change: dict[str, Any], message: str
) -> None:
    counts = measured(probes(7, 0.5), probes(9, 0.5), (46, 47), 0.04, (22.5, 23.0))
    path = write(tmp_path / "scan.h5", counts)
    calibration = said(**({"scan_step": 0.5, "detector_step": 0.04, "origin": (22.5, 23)} | change))
    with pytest.raises(UserError, match=f"scan.h5:/scan: .*{message}"):
        convert(path, tmp_path / "data", Given(calibration=calibration), Wish(match=run))
    assert not (tmp_path / "data").exists()


def test_another_microscope_setting_is_a_warning(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(
        tmp_path / "scan.h5", measured(probes(7, 0.5), probes(9, 0.5), (46, 47), 0.04, (22.5, 23.0))
    )
    calibration = said(scan_step=0.5, detector_step=0.04, energy=200.0, semi_angle=12.6)
    given, wish = Given(calibration=calibration), Wish(match=run)
    assert convert(path, tmp_path / "data", given, wish, dry_run=True) == []
    shown = capsys.readouterr().out
    assert "warning: energy is 200 keV, the network was trained on 100 to 100" in shown
    assert "warning: semi_angle is 12.6 mrad" in shown
    assert "0.04 1/Å  (user)" in shown
    assert "fields: 1 of 4 x 5 probes every 1 Å, 9 x 9 pixels of 0.16 1/Å" in shown
    assert not (tmp_path / "data").exists()


# On the file's own sampling

CALIBRATION = said(scan_step=0.5, detector_step=0.02, origin=(3.0, 5.0))
GIVEN = Given(calibration=CALIBRATION)


def test_whole_scans_keep_every_value(tmp_path: Path) -> None:
    made = convert(write(tmp_path / "a.h5", foreign.scan()), tmp_path / "data", GIVEN, Wish())
    found, table = read_back(made)
    assert np.array_equal(found, foreign.scan()[None])
    shard = shards.open_shard(made[0])
    assert shard.axes == Axes(0.5, 0.02, 0.0, 0.0) and shard.potential_shape is None
    assert shard.cbed_unit == "as in the file"
    (record,) = table
    assert record["material"] == b"a.h5:/scan" and record["index"] == 0
    assert np.isnan([record[name] for name in ("energy", "semi_angle", "dose", "defocus")]).all()
    provenance = json.loads(shard.provenance)
    assert provenance["source"] == "a.h5" and provenance["scan"] == "/scan"
    assert "scan_step 0.5 Å (user)" in provenance["calibration"]


def test_fields_know_where_they_were_cut(tmp_path: Path) -> None:
    patterns = np.random.default_rng(1).random((7, 8, 4, 4), np.float32)
    given = Given(calibration=said(scan_step=1, detector_step=0.1, origin=(1.5, 1.5)))
    wish = Wish(wanted=Wanted(field=(3, 4), overlap=1))
    made = convert(write(tmp_path / "a.h5", patterns), tmp_path / "data", given, wish)
    found, table = read_back(made)
    assert table["scan_start"].tolist() == [[y, x] for y in (0, 2, 4) for x in (0, 3, 4)]
    assert table["index"].tolist() == list(range(9))
    stitched = np.full_like(patterns, np.nan)
    for cut, (y, x) in zip(found, table["scan_start"], strict=True):
        stitched[y : y + 3, x : x + 4] = cut
    assert np.array_equal(stitched, patterns)


def test_crop_round_the_axis_and_bin(tmp_path: Path) -> None:
    patterns = np.random.default_rng(2).random((2, 2, 12, 13), np.float32)
    given = Given(calibration=said(scan_step=1, detector_step=0.1, origin=(6.0, 5.5), beam=2.0))
    wish = Wish(wanted=Wanted(detector=(3, 4), binning=2))
    made = convert(write(tmp_path / "a.h5", patterns), tmp_path / "data", given, wish)
    found, _ = read_back(made)
    wanted = patterns[:, :, 4:10, 2:10].reshape(2, 2, 3, 2, 4, 2).sum((3, 5)) / 2
    # 6 pixels centred on pixel 6 are 3.5 to 8.5, so the axis moves by half a pixel.
    assert found[0] == pytest.approx(wanted, rel=1e-5)
    shard = shards.open_shard(made[0])
    assert shard.axes.detector_step == pytest.approx(0.2)
    assert shard.cbed_unit == "fraction of the beam"


@pytest.mark.parametrize("flip", [(), ("ky",), ("kx", "y"), ("ky", "kx")])
def test_the_origin_is_a_pixel_of_the_file(tmp_path: Path, flip: tuple[str, ...]) -> None:
    patterns = np.random.default_rng(2).random((2, 2, 9, 12), np.float32)
    axes = [foreign.NAMES.index(name) for name in flip]
    calibration = said(scan_step=1, detector_step=0.1, origin=(3.0, 4.0))
    made = convert(
        write(tmp_path / "a.h5", patterns),
        tmp_path / "data",
        Given(calibration=calibration, flip=flip),
        Wish(wanted=Wanted(detector=(5, 7))),
    )
    wanted = np.flip(patterns[:, :, 1:6, 1:8], axes)
    assert np.array_equal(read_back(made)[0][0], wanted)


def test_the_user_overrides_the_file(tmp_path: Path) -> None:
    write_abtem(tmp_path / "a.zarr")
    given = Given(calibration=said(scan_step=0.7, detector_step=0.05, origin=(2.0, 5.0)))
    wish = Wish(wanted=Wanted(detector=(3, 5)))
    made = convert(tmp_path / "a.zarr", tmp_path / "data", given, wish)
    assert shards.open_shard(made[0]).axes == Axes(0.7, 0.05, 0, 0)
    assert np.array_equal(read_back(made)[0][0], foreign.scan()[:, :, 1:4, 3:8])


def test_by_default_the_largest_detector_round_the_axis(tmp_path: Path) -> None:
    patterns = np.random.default_rng(3).random((1, 2, 9, 12), np.float32)
    given = Given(calibration=said(scan_step=1, detector_step=0.1, origin=(3.0, 6.0)))
    made = convert(write(tmp_path / "a.h5", patterns), tmp_path / "data", given, Wish())
    # Rows 0 to 6 lie round row 3; column 6 of 12 is the middle to half a pixel.
    assert np.array_equal(read_back(made)[0][0], patterns[:, :, :7])


@pytest.mark.parametrize(("turns", "rotation"), [(1, -90.0), (2, 180.0), (3, 90.0)])
def test_a_detector_turned_by_quarters_is_turned_back(
    tmp_path: Path, turns: int, rotation: float
) -> None:
    patterns = np.random.default_rng(4).random((2, 3, 7, 11), np.float32)
    path = write(tmp_path / "a.h5", np.rot90(patterns, turns, (2, 3)))
    origin = (3.0, 5.0) if turns == 2 else (5.0, 3.0)
    calibration = said(scan_step=1, detector_step=0.1, origin=origin, rotation=rotation)
    made = convert(path, tmp_path / "data", Given(calibration=calibration), Wish())
    assert np.array_equal(read_back(made)[0][0], patterns)


def test_unequal_steps_need_a_match(tmp_path: Path, run: Path) -> None:
    counts = measured(probes(7, 0.5), probes(9, 0.5), (46, 47), 0.04, (22.5, 23.0))
    path = write(tmp_path / "a.h5", counts[:, ::2])  # every 0.5, 1 Å
    unequal = {"scan_step": Known(Quantity((0.5, 1.0), "Å"), "user")}
    given = Given(calibration=said(detector_step=0.04) | unequal)
    with pytest.raises(
        UserError, match=r"scan steps are 0.5 x 1 Å, wanted equal ones; give --match"
    ):
        convert(path, tmp_path / "data", given, Wish())
    made = convert(path, tmp_path / "data", given, Wish(match=run))
    assert read_back(made)[0].shape == (1, 4, 5, 9, 9)


def test_a_scan_streams_in_parts_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patterns = np.random.default_rng(5).random((20, 6, 8, 8), np.float32)
    path = write(tmp_path / "a.h5", patterns)
    asked: list[int] = []
    original = h5py.Dataset.__getitem__

    def counting(dataset: h5py.Dataset, index: Any) -> Any:
        block = original(dataset, index)
        asked.append(getattr(block, "nbytes", 0))
        return block

    row = 6 * 8 * 8 * 4
    monkeypatch.setattr(cutting, "READ_BYTES", 2 * row)
    monkeypatch.setattr(cutting, "SURVEY_BYTES", 5 * row)
    monkeypatch.setattr(converting, "SHARD_BYTES", 3 * 25 * 64 * 4)
    monkeypatch.setattr(h5py.Dataset, "__getitem__", counting)
    given = Given(calibration=said(scan_step=1, detector_step=0.1))
    made = convert(path, tmp_path / "data", given, Wish(wanted=Wanted(field=(5, 5))))
    assert 0 < max(asked) <= 2 * row
    assert len(asked) <= 5 + 4 * 3 and sum(asked) <= (5 + 20) * row
    monkeypatch.undo()
    assert [shards.open_shard(path).count for path in made] == [3, 3, 2]
    found, table = read_back(made)
    y, x = table["scan_start"][6]
    assert np.array_equal(found[6], patterns[y : y + 5, x : x + 5])


# Whole sets of samples


def test_records_keep_their_potentials(tmp_path: Path) -> None:
    cbed, potential = write_records(tmp_path / "batch_train_0.db")
    given = Given(scan=(2, 3), calibration=said(scan_step=1.0, detector_step=0.1))
    made = convert(tmp_path / "batch_train_0.db", tmp_path / "data", given, Wish(split="train"))
    assert [path.name for path in made] == ["batch_train_0-00000.h5"]
    shard = shards.open_split(tmp_path / "data", "train").shards[0]
    found = shards.read_samples(shard, [0, 1])
    assert np.array_equal(found["cbed"], cbed.reshape(2, 2, 3, 4, 4))
    assert np.array_equal(found["potential"], potential[:, 0])
    assert shard.axes.potential_pixel == pytest.approx(0.5)  # 2 Å in 4 pixels


def test_cut_fields_leave_potentials_out_and_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_records(tmp_path / "a.db")
    given = Given(scan=(2, 3), calibration=said(scan_step=1.0, detector_step=0.1))
    made = convert(tmp_path / "a.db", tmp_path / "data", given, Wish(wanted=Wanted(field=(2, 2))))
    assert shards.open_shard(made[0]).potential_shape is None
    assert "potentials are left out" in capsys.readouterr().out


def test_olcf_samples_keep_what_is_known_of_them(tmp_path: Path) -> None:
    stacks = write_olcf(tmp_path / "batch_train_0.h5")
    given = Given(calibration=said(detector_step=0.05, origin=(3.5, 3.5)))
    made = convert(tmp_path / "batch_train_0.h5", tmp_path / "data", given, Wish())
    found, table = read_back(made)
    assert np.array_equal(found.reshape(6, 8, 8), stacks.reshape(6, 8, 8))
    assert table["material"].tolist() == [b"mp-0"] * 3 + [b"mp-1"] * 3
    assert table["space_group"].tolist() == [b"225"] * 6
    assert table["zone_axis"][2].tolist() == [1, 1, 1]
    assert table["semi_angle"] == pytest.approx([3, 4, 5] * 2)
    assert shards.open_shard(made[0]).axes.scan_step == 0


def test_scans_of_different_sampling_do_not_mix(tmp_path: Path) -> None:
    write_olcf(tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file["sample_1_4"].attrs["energy_keV"] = 180.0
    angles = {"detector_step": Known(Quantity((0.5, 0.5), "mrad"), "user")}
    given = Given(calibration=said(origin=(3.5, 3.5)) | angles)
    with pytest.raises(UserError, match=r"sample_1_4/cbed_stack\[0\].*--detector-step in 1/Å"):
        convert(tmp_path / "a.h5", tmp_path / "data", given, Wish())
    assert not list((tmp_path / "data").glob("*/*"))


# What is there already, and what fails


def test_the_manifest_keeps_what_it_had(tmp_path: Path) -> None:
    data = tmp_path / "data"
    first = convert(write(tmp_path / "a.h5", foreign.scan()), data, GIVEN, Wish())
    content = files.read_json(data / manifest.NAME, manifest.SCHEMA)
    files.write_json(data / manifest.NAME, manifest.SCHEMA, content | {"note": "kept"})
    second = convert(write(tmp_path / "b.h5", foreign.scan()), data, GIVEN, Wish(split="dev"))
    content = files.read_json(data / manifest.NAME, manifest.SCHEMA)
    assert content["note"] == "kept"
    assert content["shards"] == [manifest.shard_record(path) for path in (*second, *first)]


def test_names_and_kinds_are_not_mixed_up(tmp_path: Path) -> None:
    data, path = tmp_path / "data", write(tmp_path / "a.h5", foreign.scan())
    convert(path, data, GIVEN, Wish())
    with pytest.raises(UserError, match=r"a-00000.h5: is there already; give --name, or delete"):
        convert(path, data, GIVEN, Wish())
    other = Wish(name="b", wanted=Wanted(field=(2, 2)))
    with pytest.raises(UserError, match=r"holds fields \(3, 5, 7, 11\).*another DATA or --split"):
        convert(path, data, GIVEN, other)
    assert [each.name for each in convert(path, data, GIVEN, Wish(name="b"))] == ["b-00000.h5"]


def test_nothing_is_left_when_the_file_ends_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, data = tmp_path / "scan_x4_y6.raw", tmp_path / "data"
    frames = np.ones((24, 130, 128), np.float32)
    frames[-1, 5, 7] = np.nan
    path.write_bytes(frames.tobytes())
    monkeypatch.setattr(converting, "SHARD_BYTES", 1)
    given = Given(calibration=said(scan_step=1, detector_step=0.01, origin=(63.5, 63.5)))
    with pytest.raises(UserError, match=r"probe \(5, 3\) holds NaN.*pixel \(5, 7\)"):
        convert(path, data, given, Wish(wanted=Wanted(field=(1, 4))))
    assert list(data.glob("**/*.h5")) == [] and not (data / manifest.NAME).exists()


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        (Wish(wanted=Wanted(field=(4, 5))), "has 3 probe positions along an axis.*needs 4"),
        (Wish(wanted=Wanted(field=(2, 2), overlap=2)), "--overlap is 2, wanted less than the 2"),
        (Wish(wanted=Wanted(binning=20)), "--bin 20 is more than the detector"),
        (Wish(wanted=Wanted(detector=(9, 9))), "beyond what was measured"),
        (Wish(dtype="float16"), "intensities reach .*give --dtype float32 or --beam"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, wish: Wish, message: str) -> None:
    path = write(tmp_path / "a.h5", foreign.scan("float32") * 1e3)
    with pytest.raises(UserError, match=message):
        convert(path, tmp_path / "data", GIVEN, wish)


def test_a_sample_of_half_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_tools.importers.prepare.SAMPLE_BYTES", 1000)
    path = write(tmp_path / "a.h5", foreign.scan())
    with pytest.raises(UserError, match=r"all 3 x 5 probes has 4.6 kB; cut it with --field"):
        convert(path, tmp_path / "data", GIVEN, Wish())
