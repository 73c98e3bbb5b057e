"""The options of `stemdl-data import`, and what they make of a user's words."""

import argparse
from pathlib import Path

from data_tools.importers.calibration import Known, parse_quantity
from data_tools.importers.fields import Wanted
from data_tools.importers.prepare import Wish
from data_tools.importers.scan import NAMES, Given
from stemdl.errors import UserError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add them all, in groups."""
    parser.add_argument("source", metavar="SRC", type=Path, help="file or folder to import")
    parser.add_argument("--to", metavar="DATA", type=Path, required=True, help="data directory")
    parser.add_argument(
        "--match", metavar="RUN", type=Path, help="make fields that this trained run can take"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show what the file says and would become"
    )

    group = parser.add_argument_group("calibration, where the file lacks it or is wrong")
    for name, metavar, what in (
        ("scan-step", "LENGTH", "distance of probe positions: 0.5 [Å], 0.05nm, 0.5,0.4 (y,x)"),
        ("detector-step", "STEP", "width of a detector pixel: 0.02 [1/Å] or 0.43mrad"),
        ("origin", "KY,KX", "detector pixel ky,kx of the optic axis, as the file counts them"),
        ("rotation", "DEGREES", "of the detector's axes into the scan's [degrees], docs/import.md"),
        ("energy", "KEV", "of the beam [keV]"),
        ("semi-angle", "MRAD", "of convergence [mrad]"),
        ("beam", "SUM", "what a pattern of the whole beam would sum to"),
    ):
        group.add_argument(f"--{name}", metavar=metavar, help=what)

    group = parser.add_argument_group("how the file has the patterns")
    group.add_argument("--key", help="path of the array in the file")
    group.add_argument("--axes", help="order of y,x,ky,kx in the file, slowest first")
    group.add_argument("--flip", help="those of y,x,ky,kx that run backwards")
    group.add_argument("--scan", metavar="Y,X", help="shape of the scan, for a list of patterns")
    group.add_argument(
        "--fill-nan", metavar="VALUE", type=float, help="value in place of NaN and infinity"
    )

    group = parser.add_argument_group("what to make of it")
    group.add_argument("--field", metavar="Y,X", help="probes of a sample [the whole scan]")
    group.add_argument(
        "--overlap", metavar="N", type=int, default=0, help="probes that fields share [0]"
    )
    group.add_argument("--detector", metavar="KY,KX", help="pixels to keep round the optic axis")
    group.add_argument(
        "--bin", metavar="N", type=int, default=1, help="sum N x N detector pixels [1]"
    )
    group.add_argument("--dtype", choices=("float32", "float16"), default="float32")
    group.add_argument("--split", choices=("train", "dev", "test"), default="test")
    group.add_argument("--name", help="of the shards [the file's]")
    group.add_argument("--material", help="what the specimen is [what the file says]")


def read_given(options: argparse.Namespace) -> Given:
    """What the user says of the file.

    Raises:
        UserError: a word that means nothing; names option, value found and value wanted.
    """
    calibration = {}
    for name, units in (("scan_step", ("Å",)), ("detector_step", ("1/Å", "mrad"))):
        option, text = f"--{name.replace('_', '-')}", getattr(options, name)
        if text is not None:
            calibration[name] = Known(parse_quantity(text, option, units), option)
    for name in ("rotation", "energy", "semi_angle", "beam"):
        option, text = f"--{name.replace('_', '-')}", getattr(options, name)
        if text is not None:
            value = _numbers(text, option, 1)[0]
            if name != "rotation" and value <= 0:
                raise UserError(f"{option} is {text}, wanted more than 0")
            calibration[name] = Known(value, option)
    if options.origin is not None:
        ky, kx = _numbers(options.origin, "--origin", 2)
        calibration["origin"] = Known((ky, kx), "--origin")
    axes = None if options.axes is None else _names(options.axes, "--axes")
    if axes is not None and sorted(axes) != sorted(NAMES):
        raise UserError(f"--axes is {options.axes!r}, wanted each of y,x,ky,kx once")
    return Given(
        key=options.key,
        axes=axes,
        flip=() if options.flip is None else _names(options.flip, "--flip"),
        scan=_shape(options.scan, "--scan"),
        fill_nan=options.fill_nan,
        calibration=calibration,
    )


def read_wish(options: argparse.Namespace) -> Wish:
    """What the user wants of the import.

    Raises:
        UserError: as read_given, or options that exclude each other.
    """
    own = {"--field": options.field, "--detector": options.detector}
    clashing = [option for option, value in own.items() if value is not None]
    clashing += ["--bin"] if options.bin != 1 else []
    if options.match is not None and clashing:
        raise UserError(f"{clashing[0]} goes without --match, which takes it from the run")
    if options.bin < 1 or options.overlap < 0:
        raise UserError(
            f"--bin is {options.bin} and --overlap {options.overlap}, wanted at least 1 and 0"
        )
    if options.name is not None and "/" in options.name:
        raise UserError(f"--name is {options.name!r}, wanted a name without /")
    return Wish(
        match=options.match,
        wanted=Wanted(
            field=_shape(options.field, "--field"),
            detector=_shape(options.detector, "--detector"),
            binning=options.bin,
            overlap=options.overlap,
        ),
        split=options.split,
        name=options.name,
        material=options.material,
        dtype=options.dtype,
    )


def _numbers(text: str, option: str, count: int) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if len(found) != count:
        wanted = "a number" if count == 1 else f"{count} numbers with a comma"
        raise UserError(f"{option} is {text!r}, wanted {wanted}")
    return found


def _shape(text: str | None, option: str) -> tuple[int, int] | None:
    if text is None:
        return None
    y, x = _numbers(text, option, 2)
    if y < 1 or x < 1 or y != int(y) or x != int(x):
        raise UserError(f"{option} is {text!r}, wanted two whole numbers above 0")
    return int(y), int(x)


def _names(text: str, option: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not set(names) <= set(NAMES) or len(set(names)) < len(names):
        raise UserError(f"{option} is {text!r}, wanted some of y,x,ky,kx")
    return names
