"""What a scan's pixels mean: units, what a file says, what its user says, and who said what.

Lengths become Å, spatial frequencies 1/Å, energies keV, angles mrad, rotations degrees. Pairs go
(y, x) or (ky, kx). The optic axis is a detector pixel: 0 is the centre of the first.
"""

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from stemdl.electrons import spatial_frequency
from stemdl.errors import UserError

Pair = tuple[float, float]

_LENGTHS = {
    "Å": 1.0,
    "A": 1.0,
    "angstrom": 1.0,
    "pm": 1e-2,
    "nm": 1e1,
    "μm": 1e4,
    "um": 1e4,
    "m": 1e10,
}
_ANGLES = {"mrad": 1.0, "rad": 1e3}
_UNIT = re.compile(r"1/(?P<under>\w+)|(?P<inverse>[^\W\d]+)\^?-1|(?P<plain>\w+)")
_QUANTITY = re.compile(
    r"(?P<y>{0})(,(?P<x>{0}))?\s*(?P<unit>.*)".format(r"\d*\.?\d+(?:[eE]-?\d+)?")
)


@dataclass(frozen=True)
class Quantity:
    """A pair in the unit "Å", "1/Å" or "mrad"."""

    value: Pair
    unit: str

    def __str__(self) -> str:
        y, x = self.value
        return f"{y:.6g} {self.unit}" if y == x else f"{y:.6g}, {x:.6g} {self.unit}"


def parse_unit(text: str | None) -> tuple[str, float] | None:
    """The unit "Å", "1/Å" or "mrad" that `text` is a multiple of, and the factor to it.

    None for pixels and whatever else is no length, spatial frequency or angle. Reads the spellings
    of microscopy files: nm, [n_m], A^-1, 1 / nm, nm⁻¹, mrad.
    """
    # NFKC makes one letter of the two Å, of the two μ, and plain text of superscripts.
    text = unicodedata.normalize("NFKC", text or "").replace("\N{MINUS SIGN}", "-")
    match = _UNIT.fullmatch(re.sub(r"[\s_\[\]]", "", text))
    if match is None:
        return None
    name = match["under"] or match["inverse"] or match["plain"]
    length = _LENGTHS.get(name) or _LENGTHS.get(name.lower())
    if not match["plain"]:
        return ("1/Å", 1 / length) if length else None
    if length:
        return "Å", length
    return ("mrad", _ANGLES[name]) if name in _ANGLES else None


def quantity(pair: Pair, unit: str | None) -> Quantity | None:
    """A pair in a file's unit as a Quantity; None if the unit is unknown or a value is 0."""
    known = parse_unit(unit)
    if known is None or not all(pair):
        return None
    return Quantity((abs(pair[0]) * known[1], abs(pair[1]) * known[1]), known[0])


def parse_quantity(text: str, option: str, units: tuple[str, ...]) -> Quantity:
    """Read what a user wrote for an option: 0.5, 0.05nm, 0.5,0.4 (y, x) or 0.43mrad.

    Args:
        units: those that fit, of "Å", "1/Å" and "mrad"; a bare number is in the first.
    """
    match = _QUANTITY.fullmatch(text.strip())
    known = (units[0], 1.0) if match and not match["unit"] else parse_unit(match and match["unit"])
    if match is None or known is None or known[0] not in units:
        raise UserError(
            f"{option} is {text!r}, wanted a number or two (y,x) in {' or '.join(units)}, "
            f"such as {'0.5 or 0.05nm' if 'Å' in units else '0.02 or 0.43mrad'}"
        )
    y, x = float(match["y"]), float(match["x"] or match["y"])
    if not y > 0 or not x > 0:
        raise UserError(f"{option} is {text!r}, wanted more than 0")
    return Quantity((y * known[1], x * known[1]), known[0])


@dataclass(frozen=True)
class Known:
    """A value of the calibration and its source: the file, an option, or a measurement."""

    value: Any
    source: str


@dataclass(frozen=True)
class Disc:
    """The bright-field disc of a mean pattern, in detector pixels."""

    centre: Pair
    radius: float


@dataclass(frozen=True)
class Calibration:
    """All that is known of one scan; None where nothing is."""

    scan_step: Known | None  # Quantity [Å]; None for a single probe position
    detector_step: Known  # Quantity [1/Å]
    origin: Known  # Pair, the optic axis (ky, kx) [detector pixels]
    rotation: Known  # float [degrees], see resample.py
    energy: Known | None  # float [keV]
    semi_angle: Known | None  # float [mrad]
    beam: Known | None  # float, what a pattern of the whole beam sums to [the file's unit]

    def lines(self) -> list[str]:
        """One line for each value, with its source, for people."""
        units = {"origin": "pixels", "rotation": "°", "energy": "keV", "semi_angle": "mrad"}
        shown = []
        for field in fields(self):
            known = getattr(self, field.name)
            if known is None:
                shown.append(f"{field.name:14}unknown")
                continue
            value = known.value
            text = str(value) if isinstance(value, Quantity) else ", ".join(_numbers(value))
            text = f"{text} {units.get(field.name, '')}".strip()
            shown.append(f"{field.name:14}{text}  ({known.source})")
        return shown


def settle(
    where: str,
    scan: tuple[int, ...],
    known: Mapping[str, Known],
    disc: Disc | None,
) -> Calibration:
    """The calibration from what the file or the user says.

    Args:
        where: the scan, for messages.
        scan: its (Sy, Sx).
        known: by the names of Calibration's fields; detector_step also in mrad.
        disc: measured in the mean pattern, for the origin where nobody says it.

    Raises:
        UserError: a value is missing; names the option to give.
    """
    energy, semi_angle = known.get("energy"), known.get("semi_angle")
    if "scan_step" not in known and scan != (1, 1):
        raise UserError(f"{where}: does not say its scan step; give --scan-step, such as 0.5 [Å]")
    if "detector_step" not in known:
        raise UserError(
            f"{where}: does not say its detector sampling; give --detector-step, such as 0.02 "
            f"[1/Å] or 0.43mrad{_hint(disc, energy, semi_angle)}"
        )
    if "origin" not in known and disc is None:
        raise UserError(f"{where}: shows no bright-field disc; give --origin, such as 63.5,64")
    return Calibration(
        scan_step=known.get("scan_step"),
        detector_step=_frequency(where, known["detector_step"], energy),
        origin=known.get("origin") or Known(disc and disc.centre, "measured: bright-field disc"),
        rotation=known.get("rotation") or Known(0.0, "assumed; give --rotation if it is not"),
        energy=energy,
        semi_angle=semi_angle,
        beam=known.get("beam"),
    )


def disagreement(calibration: Calibration, disc: Disc | None) -> str | None:
    """A warning if the disc's radius is not what semi-angle and sampling say, within a fifth."""
    energy, semi_angle = calibration.energy, calibration.semi_angle
    if disc is None or energy is None or semi_angle is None:
        return None
    step = sum(calibration.detector_step.value.value) / 2
    wanted = spatial_frequency(semi_angle.value, energy.value) / step
    if abs(disc.radius - wanted) <= max(1, 0.2 * wanted):
        return None
    return (
        f"the bright-field disc is {disc.radius:.1f} pixels in radius, but {semi_angle.value:g} "
        f"mrad at {energy.value:g} keV and {step:.4g} 1/Å a pixel make {wanted:.1f}; "
        "check --detector-step, --energy and --semi-angle"
    )


def _frequency(where: str, step: Known, energy: Known | None) -> Known:
    """A detector sampling in 1/Å: angle over wavelength (small angles)."""
    if step.value.unit == "1/Å":
        return step
    if energy is None:
        raise UserError(
            f"{where}: the detector sampling is {step.value}; give --energy [keV] to turn it into "
            "1/Å, or --detector-step in 1/Å"
        )
    y, x = (spatial_frequency(angle, energy.value) for angle in step.value.value)
    return Known(Quantity((y, x), "1/Å"), f"{step.source}, {step.value} at {energy.value:g} keV")


def _hint(disc: Disc | None, energy: Known | None, semi_angle: Known | None) -> str:
    """What the disc says about the sampling."""
    if disc is None:
        return ""
    text = f"; the bright-field disc is {disc.radius:.1f} pixels in radius"
    if energy is None or semi_angle is None:
        return text + " (with --energy and --semi-angle, its sampling is worked out here)"
    step = spatial_frequency(semi_angle.value, energy.value) / disc.radius
    return text + f", {semi_angle.value:g} mrad at {energy.value:g} keV: about {step:.4g}"


def _numbers(value: Any) -> list[str]:
    return [f"{each:.6g}" for each in (value if isinstance(value, tuple) else (value,))]
