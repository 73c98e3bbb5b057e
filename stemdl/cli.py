"""stemdl <verb>: parses the command line and calls the room that does the work."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import stemdl
from stemdl import command, config, ranks
from stemdl.errors import EXIT_INTERRUPTED

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow's chatter, not its errors

STARTED = time.time()
EXIT_RED = 1  # stemdl check: something needs mending before a job can run

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

    stage = verb("stage", _stage, "copy the data set to node-local storage (stage.dir), verified")
    _experiment_arguments(stage)
    instead = stage.add_mutually_exclusive_group()
    instead.add_argument(
        "--verify", action="store_true", help="read copies that are there, replace damaged ones"
    )
    instead.add_argument("--purge", action="store_true", help="remove the copies from every node")
    for name, run, text in (
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
    planning = verb("plan", _plan, "show when gradients are ready and how planners group them")
    _experiment_arguments(planning)
    planning.add_argument(
        "--measure", action="store_true", help="on the ranks at hand [model: scale.machine]"
    )
    scaling = verb("scale", _scale, "model step time and efficiency up to scale.ranks ranks")
    _experiment_arguments(scaling)
    launch = verb("launch", _launch, "write an experiment's job script, and submit it as a chain")
    _experiment_arguments(launch)
    launch.add_argument(
        "--site", type=Path, required=True, help="site file, such as configs/sites/summit.yaml"
    )
    launch.add_argument(
        "--on", choices=("lsf", "slurm", "flux", "local"), help="scheduler [the site file's]"
    )
    launch.add_argument("--nodes", type=int, default=1, help="nodes of the job [1]")
    launch.add_argument(
        "--chain", type=int, default=1, metavar="N", help="at most N jobs that go on in turn [1]"
    )
    launch.add_argument("--submit", action="store_true", help="put the jobs into the queue")
    launch.add_argument("--dry-run", action="store_true", help="print the script, write nothing")
    launch.add_argument("--node-logs", action="store_true", help="each node's warnings in a file")
    launch.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a key of the site file"
    )
    status = verb("status", _status, "tell where a run stands, from its files")
    status.add_argument("run_directory", metavar="RUN", type=Path, help="a run, also a running one")
    compare = verb("compare", _compare, "put runs side by side: a table, and a picture of curves")
    compare.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="trained runs")
    compare.add_argument("--to", type=Path, help="picture to write (PNG) [RUN/compare.png]")
    _experiment_arguments(
        verb("check", _check, "look at everything a job needs, on the ranks that it was started on")
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

    if parsed.purge:
        staging.purge(experiment, here)
    else:
        staging.stage(experiment, here, verify=parsed.verify)
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


def _plan(parsed: argparse.Namespace) -> int:
    experiment = config.load(parsed.config, parsed.overrides)
    here = ranks.discover()  # first: ranks that do not see each other are refused at once
    from stemdl.reduction import plan
    from stemdl.scaling import study
    from stemdl.training import rehearsal

    outlook = rehearsal.rehearse(experiment, here) if parsed.measure else None
    with here.together("planning the reduction"):
        if here.rank == 0:
            plan.report(experiment, outlook or study.outlook(experiment))
    return 0


def _scale(parsed: argparse.Namespace) -> int:
    experiment = config.load(parsed.config, parsed.overrides)
    from stemdl.scaling import study

    study.scale(experiment)
    return 0


def _launch(parsed: argparse.Namespace) -> int:
    from stemdl.launch import sites, submit

    site = sites.load(parsed.site, parsed.set)
    return submit.launch(
        [str(parsed.config), *parsed.overrides],
        site,
        on=parsed.on or site.scheduler,
        nodes=parsed.nodes,
        jobs=parsed.chain,
        submit=parsed.submit,
        dry_run=parsed.dry_run,
        node_logs=parsed.node_logs,
        written_by=["stemdl", *sys.argv[1:]],
    )


def _status(parsed: argparse.Namespace) -> int:
    from stemdl.launch import status

    print(status.status(parsed.run_directory))
    return 0


def _compare(parsed: argparse.Namespace) -> int:
    from stemdl.launch import compare

    runs = [compare.read(run) for run in parsed.runs]
    print(compare.table(runs))
    target = parsed.to or parsed.runs[0] / "compare.png"
    compare.picture(target, runs)
    print(f"\ncurves: {target}")
    return 0


def _check(parsed: argparse.Namespace) -> int:
    experiment = config.load(parsed.config, parsed.overrides)
    here = ranks.discover()
    from stemdl.launch import check

    return 0 if check.check(experiment, here) else EXIT_RED


def _keys(parsed: argparse.Namespace) -> int:
    print(config.describe())
    return 0


def _demo(parsed: argparse.Namespace) -> int:
    from stemdl.launch import demo

    return demo.run(parsed.overrides)
