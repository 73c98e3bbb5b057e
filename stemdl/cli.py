"""stemdl <verb>: parses the command line and calls the room that does the work."""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import stemdl
from stemdl import command, config, ranks
from stemdl.errors import EXIT_INTERRUPTED

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow's chatter, not its errors

STARTED = time.time()

EXAMPLES = """\
from crystals to a report:
  stemdl-data simulate configs/demo.yaml           make a data set
  mpirun -n 2 stemdl train configs/demo.yaml       train on 2 ranks (srun and jsrun work as well)
  mpirun -n 2 stemdl evaluate configs/demo.yaml    score unseen materials, write report.html
  stemdl predict runs/demo measured.h5             reconstruct measured patterns

any key of the experiment file can be set by its dotted path:
  stemdl train configs/demo.yaml train.epochs=5 train.optimizer.lr=5e-4
  stemdl keys                                      all keys, with units and defaults
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; return the exit code (0 done, 2 user's mistake, 75 stopped early)."""
    parsed = parser().parse_args(arguments)
    return command.run(lambda: parsed.run(parsed))


def parser() -> argparse.ArgumentParser:
    """The command line of `stemdl`."""
    parser = argparse.ArgumentParser(
        prog="stemdl",
        description=stemdl.__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"stemdl {stemdl.__version__}")
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")

    def verb(
        name: str, run: Callable[[argparse.Namespace], int], text: str
    ) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        added.set_defaults(run=run)
        return added

    for name, run, text in (
        ("stage", _stage, "copy the data set to node-local storage (stage.dir), verified"),
        ("train", _train, "train the network on all ranks that this command was started with"),
        ("evaluate", _evaluate, "score the trained network and write RUN/report/report.html"),
    ):
        _experiment_arguments(verb(name, run, text))
    predict = verb("predict", _predict, "reconstruct a file of measured patterns")
    predict.add_argument("run_directory", metavar="RUN", type=Path, help="a trained run")
    predict.add_argument("file", metavar="FILE", type=Path, help="HDF5 file with a dataset 'cbed'")
    predict.add_argument(
        "--to", type=Path, help="HDF5 file to write, a picture beside it [FILE.potential.h5]"
    )
    verb("keys", _keys, "print every key of the experiment file with its default and meaning")
    demo = verb("demo", _demo, "simulate, stage, train on 2 ranks and evaluate, small")
    demo.add_argument("overrides", nargs="*", metavar="key=value", help="see stemdl keys")
    return parser


def _experiment_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", type=Path, help="experiment file (YAML)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="see stemdl keys")


def _stage(parsed: argparse.Namespace) -> int:
    experiment = config.load(parsed.config, parsed.overrides)
    here = ranks.discover()  # first: ranks that do not see each other are refused at once
    from stemdl.data import staging

    staging.stage(experiment, here)
    return 0


def _train(parsed: argparse.Namespace) -> int:
    experiment = config.load(parsed.config, parsed.overrides)
    here = ranks.discover()  # first: ranks that do not see each other are refused at once
    from stemdl.training import trainer

    outcome = trainer.train(experiment, here, started=STARTED)
    return 0 if outcome.stopped is None else EXIT_INTERRUPTED


def _evaluate(parsed: argparse.Namespace) -> int:
    experiment = config.load(parsed.config, parsed.overrides)
    here = ranks.discover()  # first: ranks that do not see each other are refused at once
    from stemdl.evaluation import report

    report.evaluate(experiment, here)
    return 0


def _predict(parsed: argparse.Namespace) -> int:
    from stemdl.evaluation import predict

    target = parsed.to or parsed.file.with_suffix(".potential.h5")
    predict.predict(parsed.run_directory, parsed.file, target, ranks.discover())
    return 0


def _keys(parsed: argparse.Namespace) -> int:
    print(config.describe())
    return 0


def _demo(parsed: argparse.Namespace) -> int:
    from stemdl.launch import demo

    return demo.run(parsed.overrides)
