"""Readers find every value where another program wrote it, and the calibration that it wrote."""

import itertools
import sys
from pathlib import Path
from typing import Any

import foreign_files as foreign
import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

from data_tools import importers
from data_tools.importers.scan import Given, Scan
from stemdl.errors import UserError

SCAN = foreign.scan()


def read(path: Path, **said: Any) -> tuple[Scan, NDArray]:
    """The one scan of a file, and its patterns read in two parts."""
    with importers.read(path, Given(**said)) as scans:
        assert len(scans) == 1
        (scan,) = scans
        patterns = np.concatenate([scan.rows(0, 2), scan.rows(2, scan.shape[0])])
        assert patterns.shape == scan.shape
        return scan, patterns


def refused(path: Path, match: str, **said: Any) -> None:
    with pytest.raises(UserError, match=match), importers.read(path, Given(**said)):
        pass


def values(scan: Scan) -> dict[str, Any]:
    found = {}
    for name, known in scan.known.items():
        value = getattr(known.value, "value", known.value)
        found[name] = (value, known.value.unit) if hasattr(known.value, "unit") else value
    return found


def write_hdf5(path: Path, array: NDArray, name: str = "scan/patterns") -> Path:
    with h5py.File(path, "w") as file:
        file[name] = array
    return path


# Plain HDF5


@pytest.mark.parametrize("order", list(itertools.permutations(foreign.NAMES)))
def test_every_order_of_axes(tmp_path: Path, order: tuple[str, ...]) -> None:
    path = write_hdf5(tmp_path / "a.h5", foreign.stored(order))
    scan, patterns = read(path, axes=order)
    assert scan.axes is not None and scan.axes.source == "--axes"
    assert np.array_equal(patterns, SCAN)


@pytest.mark.parametrize(
    "flip",
    [flip for n in range(1, 5) for flip in itertools.combinations(foreign.NAMES, n)],
)
def test_every_flip(tmp_path: Path, flip: tuple[str, ...]) -> None:
    axes = [foreign.NAMES.index(name) for name in flip]
    path = write_hdf5(tmp_path / "a.h5", np.flip(SCAN, axes))
    assert np.array_equal(read(path, flip=flip)[1], SCAN)


def test_rows_anywhere(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "a.h5", SCAN)
    with importers.read(path, Given(flip=("y",))) as (scan,):
        assert np.array_equal(scan.rows(1, 2), SCAN[::-1][1:2])
        assert np.array_equal(scan.rows(2, 3), SCAN[::-1][2:3])


def test_a_list_of_patterns(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "a.h5", SCAN.reshape(15, 7, 11))
    assert np.array_equal(read(path, scan=(3, 5))[1], SCAN)
    refused(path, "15 patterns, but --scan 4,5 makes 20", scan=(4, 5))
    refused(path, r"no 4D array.*--scan.*scan/patterns \(15, 7, 11\)")


def test_many_scans_in_one_array(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "a.h5", np.stack([SCAN, SCAN + 5]))
    with importers.read(path) as scans:
        assert [scan.where[-3:] for scan in scans] == ["[0]", "[1]"]
        assert np.array_equal(scans[1].rows(0, 3), SCAN + 5)


def test_key_chooses_among_arrays(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "a.h5", SCAN, "first")
    with h5py.File(path, "a") as file:
        file["group/second"] = SCAN + 1
    refused(path, r"several scans; give --key, one of first \(3, 5, 7, 11\), group/second")
    assert np.array_equal(read(path, key="/group/second")[1], SCAN + 1)
    refused(path, "no array 'third'", key="third")


def test_our_own_shard_is_refused_with_advice(tiny_data: Path) -> None:
    refused(tiny_data / "test" / "00000.h5", "shard already; stemdl predict")


def test_nan_is_refused_or_filled(tmp_path: Path) -> None:
    array = SCAN.astype(np.float32)
    array[2, 4, 6, 10] = np.nan
    path = write_hdf5(tmp_path / "a.h5", array)
    with importers.read(path) as (scan,):
        assert np.array_equal(scan.rows(0, 2), array[:2])
        with pytest.raises(UserError, match=r"probe \(2, 4\) .*pixel \(6, 10\); give --fill-nan"):
            scan.rows(2, 3)
    _, patterns = read(path, fill_nan=7.0)
    assert patterns[2, 4, 6, 10] == 7
    assert np.array_equal(patterns.ravel()[:-1], array.ravel()[:-1])


def test_truncated_and_missing_files(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "a.h5", SCAN)
    path.write_bytes(path.read_bytes()[:-100])
    refused(path, "cannot be read as HDF5.*truncated")
    refused(tmp_path / "b.h5", "no such file")
    (tmp_path / "c.xyz").write_bytes(b"something")
    refused(tmp_path / "c.xyz", "no format that is known")


def test_a_library_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.dm4").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "rsciio", None)
    refused(tmp_path / "a.dm4", r"reading it needs rsciio.*pip install 'stemdl\[formats\]'")


# py4DSTEM and EMD


def write_emd(path: Path, *, first_dim: int, units: tuple[str, ...], group_type: Any) -> None:
    with h5py.File(path, "w") as file:
        group = file.create_group("root/datacube")
        group.attrs["emd_group_type"] = group_type
        group["data"] = SCAN
        for axis, (name, unit, step) in enumerate(
            zip(("Rx", "Ry", "Qx", "Qy"), units, (0.5, 0.5, 0.02, 0.02), strict=True)
        ):
            dim = group.create_dataset(f"dim{first_dim + axis}", data=[0, step])
            dim.attrs["name"], dim.attrs["units"] = name, unit


@pytest.mark.parametrize(
    ("first_dim", "group_type", "units"),
    [(0, "array", ("A", "A", "A^-1", "A^-1")), (1, 1, ("[Å]", "[Å]", "[Å^-1]", "[Å^-1]"))],
)
def test_emd(tmp_path: Path, first_dim: int, group_type: Any, units: tuple[str, ...]) -> None:
    path = tmp_path / "a.emd"
    write_emd(path, first_dim=first_dim, units=units, group_type=group_type)
    scan, patterns = read(path)
    assert np.array_equal(patterns, SCAN)
    assert scan.axes is not None and scan.axes.source == "file: units"
    assert values(scan) == {
        "scan_step": ((0.5, 0.5), "Å"),
        "detector_step": ((0.02, 0.02), "1/Å"),
    }


def test_emd_in_nm_and_mrad(tmp_path: Path) -> None:
    path = tmp_path / "a.emd"
    write_emd(path, first_dim=0, units=("n_m", "n_m", "mrad", "mrad"), group_type="array")
    assert values(read(path)[0]) == {
        "scan_step": ((5.0, 5.0), "Å"),
        "detector_step": ((0.02, 0.02), "mrad"),
    }


def test_py4dstem_calibration(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    write_emd(path, first_dim=0, units=("pixels",) * 4, group_type="array")
    calibration = {
        "R_pixel_size": 0.4, "R_pixel_units": "A", "Q_pixel_size": 0.7, "Q_pixel_units": "mrad",
        "QR_rotation_degrees": -12.0, "QR_flip": True, "qx0_mean": 2.5, "qy0_mean": 6.0,
        "probe_center": "_None",
    }  # fmt: skip
    with h5py.File(path, "a") as file:
        for name, value in calibration.items():
            file[f"root/metadatabundle/calibration/{name}"] = value
    scan, patterns = read(path)
    assert np.array_equal(patterns, SCAN.transpose(0, 1, 3, 2))  # QR_flip
    assert values(scan) == {
        "scan_step": ((0.4, 0.4), "Å"),
        "detector_step": ((0.7, 0.7), "mrad"),
        "rotation": -12.0,
        "origin": (6.0, 2.5),
    }


def test_emd_without_units_keeps_the_usual_order_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.emd"
    write_emd(path, first_dim=0, units=("pixels",) * 4, group_type="array")
    with h5py.File(path, "a") as file:
        for axis in range(4):
            file[f"root/datacube/dim{axis}"].attrs["name"] = f"dim{axis}"
    scan, patterns = read(path)
    assert np.array_equal(patterns, SCAN) and values(scan) == {}
    assert scan.axes is not None and "assumed" in scan.axes.source


def test_units_decide_the_order(tmp_path: Path) -> None:
    path = tmp_path / "a.emd"
    write_emd(path, first_dim=0, units=("1/nm", "1/nm", "nm", "nm"), group_type="array")
    scan, patterns = read(path)
    assert np.array_equal(patterns, SCAN.transpose(2, 3, 0, 1))
    assert values(scan)["detector_step"] == ((0.05, 0.05), "1/Å")


# OLCF 10.13139/OLCF/1510313


def write_olcf(path: Path) -> NDArray:
    stacks = np.random.default_rng(0).random((2, 3, 8, 8), np.float32)
    with h5py.File(path, "w") as file:
        for number, stack in enumerate(stacks):
            group = file.create_group(f"sample_{number}_4")
            group["cbed_stack"] = stack
            group.attrs["space_group"] = b"225"
            group.attrs["material"] = b"mp-%d" % number
            group.attrs["formula"] = "NaCl"
            group.attrs["energy_keV"] = 140.0
            group.attrs["semi_angles_rad"] = np.array([0.003, 0.004, 0.005])
            group.attrs["z_dirs"] = np.array([[[1, 0, 0], [1, 1, 0], [1, 1, 1]]])
    return stacks


def test_olcf_patterns_are_single_probes_along_zone_axes(tmp_path: Path) -> None:
    stacks = write_olcf(tmp_path / "batch_train_0.h5")
    with importers.read(tmp_path / "batch_train_0.h5") as scans:
        assert [scan.shape for scan in scans] == [(1, 1, 8, 8)] * 6
        assert np.array_equal(
            np.stack([scan.rows(0, 1)[0, 0] for scan in scans]), stacks.reshape(6, 8, 8)
        )
        last = scans[5]
    assert values(last) == {"energy": 140.0, "semi_angle": pytest.approx(5.0), "rotation": 0}
    assert last.sample == {
        "material": "mp-1",
        "prototype": "sample_1_4",
        "formula": "NaCl",
        "space_group": "225",
        "zone_axis": (1, 1, 1),
    }


# The authors' LMDB


def write_records(path: Path, *, name: str = "2d_potential") -> tuple[NDArray, NDArray]:
    import lmdb

    cbed = np.arange(2 * 6 * 4 * 4).reshape(2, 6, 4, 4).astype(np.float16)
    potential = -np.arange(2 * 4 * 6).reshape(2, 1, 4, 6).astype(np.float16)
    header = {
        "input_shape": np.array([6, 4, 4], np.int64), "input_dtype": b"float16",
        "input_name": b"cbed", "output_shape": np.array([1, 4, 6], np.int64),
        "output_dtype": b"float16", "output_name": name.encode(),
    }  # fmt: skip
    with lmdb.open(str(path), subdir=False, map_size=1 << 20) as env, env.begin(write=True) as put:
        for key, value in header.items():
            put.put(key.encode(), bytes(value))
        for index in range(2):
            put.put(f"cbed_{index}".encode(), cbed[index].tobytes())
            put.put(f"{name}_{index}".encode(), potential[index].tobytes())
    return cbed, potential


@pytest.mark.parametrize("name", ["2d_potential", "potential"])
def test_lmdb_records(tmp_path: Path, name: str) -> None:
    path = tmp_path / "batch_train_0.db"
    cbed, potential = write_records(path, name=name)
    with importers.read(path, Given(scan=(2, 3))) as scans:
        assert [scan.shape for scan in scans] == [(2, 3, 4, 4)] * 2
        assert np.array_equal(scans[1].rows(0, 2).reshape(6, 4, 4), cbed[1])
        assert np.array_equal(scans[1].rows(1, 2)[0], cbed[1][3:])
        assert scans[1].potential is not None
        assert np.array_equal(scans[1].potential(), potential[1][0])
    with importers.read(path, Given(scan=(2, 3), flip=("x", "ky"))) as scans:
        assert scans[0].potential is not None
        assert np.array_equal(scans[0].potential(), potential[0][0][:, ::-1])
    refused(path, "6 probes, which are no scan of 2 x 2; give --scan Y,X")


def test_lmdb_of_something_else(tmp_path: Path) -> None:
    import lmdb

    path = tmp_path / "other.db"
    with lmdb.open(str(path), subdir=False) as env, env.begin(write=True) as put:
        put.put(b"key", b"value")
    refused(path, "no key 'input_shape'")
    path.write_bytes(b"not LMDB at all")
    refused(path, "cannot be read as LMDB")


# EMPAD


def test_empad(tmp_path: Path) -> None:
    frames = np.random.default_rng(0).random((6, 130, 128), np.float32)
    path = tmp_path / "scan_x3_y2.raw"
    path.write_bytes(frames.tobytes())
    _, patterns = read(path)
    assert np.array_equal(patterns, frames[:, :128].reshape(2, 3, 128, 128))
    _, patterns = read(path, scan=(3, 2))
    assert np.array_equal(patterns, frames[:, :128].reshape(3, 2, 128, 128))
    other = path.rename(tmp_path / "other.raw")
    refused(other, "6 patterns, which are no scan of 2 x 2; give --scan")
    other.write_bytes(frames.tobytes()[:-4])
    refused(other, "multiple of 66560")


def test_empad_by_its_xml(tmp_path: Path) -> None:
    frames = np.random.default_rng(0).random((6, 130, 128), np.float32)
    (tmp_path / "scan_x3_y2.raw").write_bytes(frames.tobytes())
    (tmp_path / "acquisition.xml").write_text(
        "<?xml version='1.0'?><root><raw_file filename='scan_x3_y2.raw'/>"
        "<iom_measurements><full_scan_field_of_view><x>3e-09</x><y>3e-09</y>"
        "<scale_factor>1.0</scale_factor></full_scan_field_of_view></iom_measurements></root>"
    )
    scan, patterns = read(tmp_path / "acquisition.xml")
    assert np.array_equal(patterns, frames[:, :128].reshape(2, 3, 128, 128))
    assert values(scan) == {"scan_step": (pytest.approx((10.0, 10.0)), "Å")}


# abTEM and plain zarr


def write_abtem(path: Path, *, fftshift: bool = True, legacy: bool = False) -> None:
    import zarr

    described = [
        {"label": "x", "units": "Å", "sampling": 0.5, "type": "ScanAxis"},
        {"label": "y", "units": "Å", "sampling": 0.4, "type": "ScanAxis"},
    ]
    detector = [
        {"label": label, "units": "1/Å", "sampling": step}
        for label, step in (("kx", 0.03), ("ky", 0.02))
    ]
    optics = {"energy": 200e3, "semiangle_cutoff": 21.4}
    root = zarr.open_group(path, mode="w")
    root.create_array("array0", data=foreign.stored(("x", "y", "kx", "ky"), "float32"))
    if legacy:
        root.attrs["type0"] = "DiffractionPatterns"
        root.attrs["kwargs0"] = {
            "sampling": [0.03, 0.02],
            "fftshift": fftshift,
            "ensemble_axes_metadata": described,
            "metadata": optics,
        }
    else:
        axes = {f"axis_{index}": axis for index, axis in enumerate(described + detector)}
        root.attrs["metadata0"] = optics | {"axes": axes, "kwargs": {"fftshift": fftshift}}


@pytest.mark.parametrize("legacy", [False, True])
def test_abtem(tmp_path: Path, legacy: bool) -> None:
    write_abtem(tmp_path / "a.zarr", legacy=legacy)
    scan, patterns = read(tmp_path / "a.zarr")
    assert np.array_equal(patterns, SCAN)
    assert values(scan) == {
        "scan_step": ((0.4, 0.5), "Å"),
        "detector_step": ((0.02, 0.03), "1/Å"),
        "beam": 1.0,
        "rotation": 0.0,
        "energy": 200.0,
        "semi_angle": 21.4,
        "origin": (3.0, 5.0),
    }


def test_abtem_with_the_zero_frequency_in_the_corner(tmp_path: Path) -> None:
    write_abtem(tmp_path / "a.zarr", fftshift=False)
    refused(tmp_path / "a.zarr", "fftshift=True")


def test_plain_zarr(tmp_path: Path) -> None:
    import zarr

    zarr.create_array(tmp_path / "a.zarr", data=SCAN)
    assert np.array_equal(read(tmp_path / "a.zarr")[1], SCAN)
    root = zarr.open_group(tmp_path / "b.zarr", mode="w")
    root.create_array("one", data=SCAN)
    root.create_array("deep/two", data=foreign.stored(("ky", "kx", "y", "x")))
    refused(tmp_path / "b.zarr", "several scans; give --key")
    _, patterns = read(tmp_path / "b.zarr", key="deep/two", axes=("ky", "kx", "y", "x"))
    assert np.array_equal(patterns, SCAN)
    (tmp_path / "c.zarr").mkdir()
    refused(tmp_path / "c.zarr", "cannot be read as zarr")


# rosettasciio's


@pytest.mark.parametrize("extension", ["dm3", "dm4"])
@pytest.mark.parametrize("order", [("y", "x", "ky", "kx"), ("ky", "kx", "y", "x")])
def test_dm_units_decide(tmp_path: Path, extension: str, order: tuple[str, ...]) -> None:
    units = {"y": "nm", "x": "nm", "ky": "1/nm", "kx": "1/nm"}
    scales = {"y": 0.05, "x": 0.04, "ky": 0.2, "kx": 0.3}
    foreign.write_dm(
        tmp_path / f"a.{extension}",
        foreign.stored(order),
        units=tuple(units[name] for name in order),
        scales=tuple(scales[name] for name in order),
        tags={"Microscope Info": {"Voltage": 200000.0}},
        version=int(extension[-1]),
    )
    scan, patterns = read(tmp_path / f"a.{extension}")
    assert np.array_equal(patterns, SCAN)
    assert values(scan) == {
        "energy": pytest.approx(200.0),
        "scan_step": (pytest.approx((0.5, 0.4)), "Å"),
        "detector_step": (pytest.approx((0.02, 0.03)), "1/Å"),
    }


@pytest.mark.parametrize(
    ("swapped", "order"),
    [
        (True, ("y", "x", "ky", "kx")),
        ("true", ("y", "x", "ky", "kx")),
        (False, ("ky", "kx", "y", "x")),
    ],
)
def test_dm_tag_decides_without_units(
    tmp_path: Path, swapped: bool | str, order: tuple[str, ...]
) -> None:
    tags = {"Meta Data": {"Data Order Swapped": swapped}}
    foreign.write_dm(tmp_path / "a.dm4", foreign.stored(order), tags=tags)
    scan, patterns = read(tmp_path / "a.dm4")
    assert np.array_equal(patterns, SCAN)
    assert scan.axes is not None and scan.axes.source == "file: Data Order Swapped"


def test_dm_that_says_nothing_needs_axes(tmp_path: Path) -> None:
    order = ("kx", "ky", "y", "x")
    foreign.write_dm(tmp_path / "a.dm4", foreign.stored(order))
    refused(tmp_path / "a.dm4", "does not say which axes.*--axes")
    assert np.array_equal(read(tmp_path / "a.dm4", axes=order)[1], SCAN)


def test_damaged_dm(tmp_path: Path) -> None:
    (tmp_path / "a.dm4").write_bytes(b"no tags here, none at all")
    refused(tmp_path / "a.dm4", "cannot be read as DigitalMicrograph")


def test_mib(tmp_path: Path) -> None:
    frames = SCAN.reshape(15, 7, 11)
    foreign.write_mib(tmp_path / "a.mib", frames, per_trigger=5)
    assert np.array_equal(read(tmp_path / "a.mib")[1], SCAN)
    foreign.write_mib(tmp_path / "b.mib", frames)
    refused(tmp_path / "b.mib", "does not say the shape of its scan.*--scan Y,X")
    assert np.array_equal(read(tmp_path / "b.mib", scan=(3, 5))[1], SCAN)
    refused(tmp_path / "b.mib", "15 patterns, but --scan 5,4 makes 20", scan=(5, 4))


def hyperspy_signal() -> dict[str, Any]:
    axes = [
        {
            "_type": "UniformDataAxis", "name": name, "size": size, "scale": scale, "offset": 0.0,
            "units": unit, "navigate": navigate, "is_binned": False,
        }
        for name, size, scale, unit, navigate in zip(
            ("slow", "fast", "height", "width"), foreign.SHAPE, (0.05, 0.04, 0.3, 0.2),
            ("nm", "nm", "mrad", "mrad"), (True, True, False, False), strict=True,
        )
    ]  # fmt: skip
    tem = {"beam_energy": 80.0, "convergence_angle": 30.0}
    return {
        "data": SCAN,
        "axes": axes,
        "metadata": {
            "General": {"title": "ptychography"},
            "Acquisition_instrument": {"TEM": tem},
        },
        "original_metadata": {},
        "learning_results": {},
        "models": {},
        "tmp_parameters": {},
        "attributes": {"_lazy": False, "ragged": False},
        "package_info": {"package": "hyperspy", "package_version": "2.0"},
    }


HYPERSPY_SAYS = {
    "energy": 80.0,
    "semi_angle": 30.0,
    "scan_step": ((0.5, 0.4), "Å"),
    "detector_step": ((0.3, 0.2), "mrad"),
}


def test_hspy(tmp_path: Path) -> None:
    from rsciio.hspy import file_writer

    file_writer(tmp_path / "a.hspy", hyperspy_signal())
    scan, patterns = read(tmp_path / "a.hspy")
    assert np.array_equal(patterns, SCAN)
    assert values(scan) == HYPERSPY_SAYS


def test_zspy_read_only(tmp_path: Path) -> None:
    import zarr

    # As rosettasciio 0.15 with zarr 2 lays it out; with zarr 3 it reads but does not write.
    signal = hyperspy_signal()
    path = tmp_path / "a.zspy"
    root = zarr.open_group(path, mode="w", zarr_format=2)
    root.attrs.update(file_format="ZSpy", file_format_version="3.3")
    group = root.create_group("Experiments/ptychography")
    group.attrs.update(package="hyperspy", package_version="2.0")
    group.create_array(
        "data", data=SCAN, chunks=(2, 5, 4, 11), chunk_key_encoding={"name": "v2", "separator": "/"}
    )
    for number, axis in enumerate(signal["axes"]):
        group.create_group(f"axis-{number}").attrs.update(axis)
    for name in ("General", "Acquisition_instrument/TEM"):
        content = signal["metadata"]
        for part in name.split("/"):
            content = content[part]
        group.create_group(f"metadata/{name}").attrs.update(content)
    for name in ("original_metadata", "learning_results", "attributes"):
        group.create_group(name)
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
    scan, patterns = read(path)
    assert np.array_equal(patterns, SCAN)
    assert values(scan) == HYPERSPY_SAYS
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*")} == before


def test_blockfile_stands_for_the_others(tmp_path: Path) -> None:
    from rsciio.blockfile import file_writer

    signal = hyperspy_signal()
    signal["data"] = (SCAN % 256).astype(np.uint8)[..., :7]  # square patterns of bytes
    for axis, size, unit in zip(
        signal["axes"], (3, 5, 7, 7), ("nm", "nm", "cm", "cm"), strict=True
    ):
        axis["size"], axis["units"] = size, unit
    file_writer(tmp_path / "a.blo", signal)
    scan, patterns = read(tmp_path / "a.blo")
    assert np.array_equal(patterns, signal["data"])
    assert scan.axes is not None and scan.axes.source == "file: navigation axes"
    assert values(scan) == {"scan_step": ((0.5, 0.4), "Å")}
