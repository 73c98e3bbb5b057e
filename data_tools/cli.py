"""stemdl-data: make data sets and look after them."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from data_tools.importers.options import add_options, read_given, read_wish
from stemdl import command, config, files, ranks
from stemdl.console import progress, say
from stemdl.data import shards

EXAMPLES = """examples:
  stemdl-data simulate configs/demo.yaml                    on all cores of this machine
  stemdl-data simulate configs/demo.yaml simulate.dose=1e4 data.dir=data/noisy
  mpirun -n 64 stemdl-data simulate configs/demo.yaml       over MPI ranks; the same bytes
  stemdl-data simulate configs/summit.yaml --dry-run        how long it would take here
  stemdl-data import scan.dm4 --to data/mine --match runs/demo --scan-step 0.4
                                                            for stemdl predict runs/demo
  stemdl-data inspect data/demo --png look.png              what is in a data set
  stemdl-data verify data/demo                              every checksum

A run that was stopped goes on where it was: give the same command again."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command `stemdl-data`; returns the exit code."""
    options = parser().parse_args(arguments)
    return command.run(lambda: options.run(options))


def parser() -> argparse.ArgumentParser:
    """The command line; each verb sets `run`, which takes the parsed options."""
    top = argparse.ArgumentParser(
        prog="stemdl-data",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = top.add_subparsers(metavar="VERB", required=True)

    simulate = verbs.add_parser(
        "simulate",
        help="simulate a data set by multislice",
        description="Simulate 4D-STEM samples of many crystals into data.dir, split by material. "
        "Finished shards are kept: run again after an interruption to go on.",
    )
    simulate.add_argument("config", metavar="CONFIG", help="experiment file (YAML)")
    simulate.add_argument(
        "overrides", metavar="key=value", nargs="*", help="such as simulate.samples.train=5000"
    )
    simulate.add_argument(
        "--dry-run", action="store_true", help="say what there is to make and how long it takes"
    )
    simulate.set_defaults(run=_simulate)

    importing = verbs.add_parser(
        "import",
        help="bring measured or others' data into shards",
        description="Read 4D-STEM data of other programs and cameras, show their calibration, and "
        "cut them into samples; with --match, on the scan step, detector sampling and shape that a "
        "trained network takes. docs/import.md lists the formats.",
    )
    add_options(importing)
    importing.set_defaults(run=_import)

    inspect = verbs.add_parser(
        "inspect",
        help="show what is in a data set or shard",
        description="Print a table of samples with statistics; draw some of them.",
    )
    inspect.add_argument("path", metavar="DATA_OR_SHARD", type=Path)
    inspect.add_argument("--png", metavar="FILE", type=Path, help="draw patterns and potentials")
    inspect.set_defaults(run=_inspect)

    verify = verbs.add_parser(
        "verify",
        help="check every checksum",
        description="Compare every byte of a data set with its checksums; exit code 2 if any "
        "differs or a file is missing.",
    )
    verify.add_argument("data", metavar="DATA", type=Path)
    verify.set_defaults(run=_verify)
    return top


def _simulate(options: argparse.Namespace) -> int:
    from data_tools.simulate import simulate

    here = ranks.discover()
    experiment = config.load(options.config, options.overrides)
    done = simulate(experiment, here, dry_run=options.dry_run)
    kept = f"; kept {done['kept']} finished shards" if done["kept"] else ""
    if options.dry_run:
        say(f"{done['directory']}: nothing was written{kept}", rank=here.rank)
        return 0
    rate = done["samples"] / max(done["seconds"], 1e-9)
    say(
        f"{done['directory']}: made {done['samples']} samples, "
        f"{files.human_bytes(done['bytes'])} in {done['seconds']:.0f} s ({rate:.2f} samples/s); "
        f"simulating took {done['making']:.0f} s, expected {done['expected']:.0f} s{kept}",
        rank=here.rank,
    )
    return 0


def _import(options: argparse.Namespace) -> int:
    from data_tools.importers.convert import convert

    given, wish = read_given(options), read_wish(options)
    made = convert(options.source, options.to, given, wish, dry_run=options.dry_run)
    for path in made:
        next_step = f"; next: stemdl predict {options.match} {path}" if options.match else ""
        say(f"{path}: written{next_step}")
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from data_tools import inspect

    for line in inspect.describe(options.path):
        say(line)
    if options.png is not None:
        inspect.draw(options.path, options.png)
        say(f"figure: {options.png}")
    return 0


def _verify(options: argparse.Namespace) -> int:
    from data_tools import inspect

    paths = inspect.shard_paths(options.data)
    for path in progress(paths, "verifying", unit="shard"):
        shards.verify(path)
    listed = inspect.check_manifest(options.data, paths)
    say(f"{options.data}: {len(paths)} shards are whole; {listed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
