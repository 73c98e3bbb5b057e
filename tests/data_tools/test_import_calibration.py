"""Units, what users write, and who has the last word on a calibration."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_tools.importers.calibration import (
    Calibration,
    Disc,
    Known,
    Quantity,
    disagreement,
    parse_quantity,
    parse_unit,
    quantity,
    settle,
)
from stemdl import electrons
from stemdl.errors import UserError


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("Å", ("Å", 1)),
        ("\N{ANGSTROM SIGN}", ("Å", 1)),
        ("A", ("Å", 1)),
        ("Angstrom", ("Å", 1)),
        ("nm", ("Å", 10)),
        ("[n_m]", ("Å", 10)),
        (" pm ", ("Å", 0.01)),
        ("µm", ("Å", 1e4)),
        ("um", ("Å", 1e4)),
        ("m", ("Å", 1e10)),
        ("1/Å", ("1/Å", 1)),
        ("A^-1", ("1/Å", 1)),
        ("1 / nm", ("1/Å", 0.1)),
        ("[n_m^-1]", ("1/Å", 0.1)),
        ("nm⁻¹", ("1/Å", 0.1)),
        ("nm-1", ("1/Å", 0.1)),
        ("1/m", ("1/Å", 1e-10)),
        ("mrad", ("mrad", 1)),
        ("rad", ("mrad", 1000)),
    ],
)
def test_units_of_microscopy_files(text: str, unit: tuple[str, float]) -> None:
    found = parse_unit(text)
    assert found is not None
    assert found[0] == unit[0] and found[1] == pytest.approx(unit[1])


@pytest.mark.parametrize("text", [None, "", "pixels", "px", "counts", "keV", "1/keV", "1/mrad"])
def test_what_is_no_length_frequency_or_angle(text: str | None) -> None:
    assert parse_unit(text) is None
    assert quantity((1, 1), text) is None


def test_an_axis_without_a_step_has_no_quantity() -> None:
    assert quantity((0.0, 0.0), "nm") is None
    assert quantity((-0.2, 0.1), "nm") == Quantity((2.0, 1.0), "Å")


@pytest.mark.parametrize(
    ("text", "units", "wanted"),
    [
        ("0.5", ("Å",), Quantity((0.5, 0.5), "Å")),
        ("0.5,0.25", ("Å",), Quantity((0.5, 0.25), "Å")),
        ("5e-2 nm", ("Å",), Quantity((0.5, 0.5), "Å")),
        (".02", ("1/Å", "mrad"), Quantity((0.02, 0.02), "1/Å")),
        ("0.2 1/nm", ("1/Å", "mrad"), Quantity((0.02, 0.02), "1/Å")),
        ("0.5mrad", ("1/Å", "mrad"), Quantity((0.5, 0.5), "mrad")),
    ],
)
def test_what_users_write(text: str, units: tuple[str, ...], wanted: Quantity) -> None:
    found = parse_quantity(text, "--option", units)
    assert found.unit == wanted.unit and found.value == pytest.approx(wanted.value)


@pytest.mark.parametrize("text", ["", "wide", "0", "-1", "1,2,3", "0.5mrad", "0.5 1/Å"])
def test_what_users_should_not_write(text: str) -> None:
    with pytest.raises(UserError, match=r"--scan-step is .*wanted"):
        parse_quantity(text, "--scan-step", ("Å",))


@settings(max_examples=50)
@given(st.floats(1e-4, 1e4), st.floats(1e-4, 1e4))
def test_a_quantity_survives_writing(y: float, x: float) -> None:
    text = str(Quantity((y, x), "Å"))
    assert parse_quantity(text.replace(", ", ","), "--scan-step", ("Å",)).value == pytest.approx(
        (y, x), rel=1e-5
    )


STEP = Known(Quantity((0.5, 0.5), "Å"), "file")
SAMPLING = Known(Quantity((0.02, 0.02), "1/Å"), "file")
ANGLES = Known(Quantity((0.4, 0.5), "mrad"), "file")
DISC = Disc((31.5, 30.0), 20.0)


def settled(given: dict[str, Known] | None = None, **found: Known) -> Calibration:
    return settle("scan.h5", (8, 8), {**found, **(given or {})}, DISC)


def test_the_file_or_a_measurement_fills_in() -> None:
    calibration = settled(scan_step=STEP, detector_step=SAMPLING)
    assert calibration.scan_step == STEP and calibration.detector_step == SAMPLING
    assert calibration.origin.value == (31.5, 30.0) and "measured" in calibration.origin.source
    assert calibration.rotation.value == 0 and "assumed" in calibration.rotation.source


def test_angles_become_frequencies_by_the_wavelength() -> None:
    energy = Known(100.0, "--energy")
    calibration = settled({"energy": energy}, scan_step=STEP, detector_step=ANGLES)
    step = calibration.detector_step.value
    assert step.unit == "1/Å"
    assert step.value == pytest.approx((0.4e-3 / 0.0370, 0.5e-3 / 0.0370), rel=1e-3)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"detector_step": SAMPLING}, "scan.h5: does not say its scan step; give --scan-step"),
        ({"scan_step": STEP}, "--detector-step.*radius .with --energy and --semi-angle"),
        ({"scan_step": STEP, "detector_step": ANGLES}, "is 0.4, 0.5 mrad; give --energy"),
    ],
)
def test_what_is_missing_is_asked_for_by_its_option(found: dict[str, Known], message: str) -> None:
    with pytest.raises(UserError, match=message):
        settled(**found)


def test_the_disc_suggests_the_sampling() -> None:
    optics_known = {"energy": Known(100.0, ""), "semi_angle": Known(20.0, "")}
    with pytest.raises(UserError, match=r"20 mrad at 100 keV: about 0.02702"):
        settled(optics_known, scan_step=STEP)


def test_no_disc_and_no_origin() -> None:
    found = {"scan_step": STEP, "detector_step": SAMPLING}
    with pytest.raises(UserError, match="no bright-field disc; give --origin"):
        settle("scan.h5", (8, 8), found, None)
    known = found | {"origin": Known((1.0, 2.0), "--origin")}
    assert settle("scan.h5", (8, 8), known, None).origin.value == (1.0, 2.0)


def test_a_single_probe_has_no_scan_step() -> None:
    assert settle("scan.h5", (1, 1), {"detector_step": SAMPLING}, DISC).scan_step is None


@pytest.mark.parametrize(("factor", "warned"), [(1.0, False), (1.1, False), (1.5, True)])
def test_a_disc_of_the_wrong_size_is_a_warning(factor: float, warned: bool) -> None:
    step = electrons.spatial_frequency(20, 100) / DISC.radius * factor
    known: dict[str, Any] = {
        "scan_step": STEP,
        "detector_step": Known(Quantity((step, step), "1/Å"), "file"),
        "energy": Known(100.0, "file"),
        "semi_angle": Known(20.0, "file"),
    }
    warning = disagreement(settled(**known), DISC)
    assert (warning is not None) == warned
    if warning:
        assert "20.0 pixels in radius" in warning and "make 13.3" in warning


def test_every_value_is_shown_with_its_source() -> None:
    calibration = settled(
        {"energy": Known(100.0, "--energy")}, scan_step=STEP, detector_step=ANGLES
    )
    text = "\n".join(calibration.lines())
    for line in ("0.5 Å  (file)", "100 keV  (--energy)", "31.5, 30 pixels  (measured", "unknown"):
        assert line in text
    assert "(file, 0.4, 0.5 mrad at 100 keV)" in text
