"""How an experiment scales on a machine: efficiency by ranks and strategy, and what bounds it.

    report = scale(config.load("configs/summit.yaml"))   # RUN/scale/{scale.json,scale.png}, a table

Efficiency is weak scaling against one rank of average speed: the time of its step over that of a
step on N ranks. What bounds a point is found by taking one cost away at a time.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import brentq

from stemdl import files
from stemdl.console import say
from stemdl.errors import UserError
from stemdl.reduction import expected
from stemdl.reduction.plan import Outlook
from stemdl.reduction.timeline import Rates
from stemdl.scaling import figure
from stemdl.scaling.machine import QUANTITIES, Description, Machine, Published, load
from stemdl.scaling.simulator import Job, Step, Strategy, link, simulate
from stemdl.schema import Experiment

SCHEMA = "stemdl.scale/1"
BOUND_AT_LEAST = 0.01  # a smaller part of the step does not bound it
MAIN, WORST = "bitvector, layer", "coordinator"  # the published pair, among the strategies
ADAM_TRAFFIC = 7 * 4  # an update reads weight, gradient and two moments, writes three: fp32 [B]


@dataclass(frozen=True)
class Study:
    """One experiment on one machine."""

    machine: Machine
    job: Job
    strategies: tuple[Strategy, ...]
    steps: int  # simulated for each point

    def strategy(self, name: str) -> Strategy:
        """Raises UserError if there is none of that name."""
        for strategy in self.strategies:
            if strategy.name == name:
                return strategy
        known = ", ".join(repr(strategy.name) for strategy in self.strategies)
        raise UserError(f"no strategy {name!r} in the study, wanted one of {known}")

    def run(self, strategy: Strategy, ranks: int) -> list[Step]:
        """The same noise for all strategies and machines."""
        return [
            simulate(self.machine, self.job, strategy, ranks, np.random.default_rng([step, ranks]))
            for step in range(self.steps)
        ]

    def seconds(self, strategy: Strategy, ranks: int) -> float:
        """Mean time of a step [s]."""
        return float(np.mean([step.duration for step in self.run(strategy, ranks)]))

    def efficiency(self, strategy: Strategy, ranks: int) -> float:
        alone = replace(strategy, global_input=False)
        return self.seconds(alone, 1) / self.seconds(strategy, ranks)

    def bound(self, strategy: Strategy, ranks: int) -> tuple[str, dict[str, float]]:
        """What bounds the step, and the part of it that each cost takes, alone [0 to 1]."""
        full = self.seconds(strategy, ranks)
        without = {
            name: max(0.0, 1 - take_away(self, strategy, ranks) / full)
            for name, take_away in _COSTS.items()
        }
        largest = max(without, key=lambda name: without[name])
        return (largest if without[largest] > BOUND_AT_LEAST else "compute"), without

    def predicted(self, result: Published) -> float:
        """The model's figure for a published result."""
        strategy = self.strategy(result.strategy)
        if result.over is None:
            return self.efficiency(strategy, result.ranks)
        other = self.strategy(result.over)
        return self.seconds(other, result.ranks) / self.seconds(strategy, result.ranks)

    def fitted(self, result: Published) -> float:
        """The value of the quantity `result.fits` at which the model gives the published figure."""
        name = result.fits
        assert name is not None

        def excess(logarithm: float) -> float:
            changed = _on(self, {name: math.exp(logarithm)})
            return changed.predicted(result) - result.value

        here = math.log(getattr(self.machine, name))
        return math.exp(brentq(excess, here - 3, here + 3, xtol=1e-3))


def _on(study: Study, changes: Mapping[str, Any]) -> Study:
    """The study on a machine with other quantities."""
    return replace(study, machine=replace(study.machine, **changes))


def _without_stragglers(study: Study, strategy: Strategy, ranks: int) -> float:
    return _on(study, {"speed_spread": 0, "step_spread": 0}).seconds(strategy, ranks)


def _without_negotiation(study: Study, strategy: Strategy, ranks: int) -> float:
    return study.seconds(replace(strategy, coordination="bitvector", cycle=1e-6), ranks)


def _without_transfer(study: Study, strategy: Strategy, ranks: int) -> float:
    endless = {"link_bandwidth": math.inf, "node_bandwidth": math.inf}
    return _on(study, endless | {"link_latency": 0, "network_latency": 0}).seconds(strategy, ranks)


def _without_input(study: Study, strategy: Strategy, ranks: int) -> float:
    return _on(study, {"local_read": math.inf, "global_read": math.inf}).seconds(strategy, ranks)


_COSTS: Mapping[str, Callable[[Study, Strategy, int], float]] = {
    "stragglers": _without_stragglers,
    "negotiation": _without_negotiation,
    "bandwidth": _without_transfer,
    "input": _without_input,
}


def prepare(experiment: Experiment) -> tuple[Study, Description]:
    """The experiment's step on its machine, and the strategies to compare."""
    machine, description = load(experiment.scale.machine)
    largest = max(experiment.scale.ranks)
    if largest > machine.nodes * machine.ranks_per_node:
        raise UserError(
            f"scale.ranks goes to {largest}, wanted at most "
            f"{machine.nodes * machine.ranks_per_node}, the ranks of {experiment.scale.machine}"
        )
    return Study(
        machine, _job(experiment, machine), _strategies(experiment), experiment.scale.steps
    ), description


def _job(experiment: Experiment, machine: Machine) -> Job:
    """The graph gives the shape of the timeline, the sustained rate its length."""
    rates = Rates(machine.peak_flops, machine.memory_bandwidth, machine.launch)
    step = expected.expect(experiment, rates)
    step = step.lasting(step.flops / machine.sustained_flops)
    wire = {"fp32": 4, "fp16": 2}[experiment.reduction.wire]
    weights = sum(gradient.bytes for gradient in step.gradients) / wire
    cbed, potential = expected.shapes(experiment)
    sample = math.prod(cbed) * np.dtype(experiment.simulate.dtype).itemsize
    sample += math.prod(potential) * 4
    return Job(
        gradients=tuple(step.gradients),
        compute=step.compute,
        update=weights * ADAM_TRAFFIC / machine.memory_bandwidth,
        input_bytes=experiment.train.batch * sample,
    )


def _strategies(experiment: Experiment) -> tuple[Strategy, ...]:
    """The published steps from the original Horovod on, then planners, then ways to do worse."""
    settings = experiment.reduction
    common = Strategy(
        name="",
        coordination="bitvector",
        planner="layer",
        hierarchical=settings.hierarchical,
        cycle=settings.cycle_time * 1e-3,
        fusion=settings.fusion_threshold * 2**20,
        group_fusion=settings.group_fusion,
    )
    variants: list[dict[str, Any]] = [
        {"name": "coordinator", "coordination": "coordinator", "planner": "none"},
        {"name": "bitvector", "planner": "none"},
        {"name": "bitvector, layer"},
        {"name": "bitvector, equal:4", "planner": "equal:4"},
        {"name": "bitvector, bytes:25MB", "planner": "bytes:25MB"},
        {"name": "bitvector, optimal", "planner": "optimal"},
        {"name": "ring across nodes", "across": "ring"},
        {"name": "flat ring", "across": "ring", "hierarchical": False},
        {"name": "global input", "global_input": True},
    ]
    return tuple(replace(common, **variant) for variant in variants)


def outlook(experiment: Experiment) -> Outlook:
    """What `stemdl plan` needs, on the largest number of ranks of `scale.ranks`.

    Raises:
        UserError: the machine file or the experiment cannot be used.
    """
    study, description = prepare(experiment)
    ranks = max(experiment.scale.ranks)
    cost = link(study.machine, study.strategy(MAIN), ranks)
    job = study.job
    return Outlook(list(job.gradients), job.compute, cost, ranks, f"{description.name}, modelled")


def scale(experiment: Experiment) -> dict[str, Any]:
    """Run the study; write RUN/scale/{scale.json,scale.png}; print the table. Returns the report.

    Raises:
        UserError: the machine file or the experiment cannot be used.
    """
    study, description = prepare(experiment)
    points = _points(study, experiment.scale.ranks)
    largest = max(experiment.scale.ranks)
    report: dict[str, Any] = {
        "machine": description.name,
        "experiment": experiment.name,
        "main": MAIN,
        "step_alone_s": study.seconds(study.strategy(MAIN), 1),
        "gradient_bytes": sum(gradient.bytes for gradient in study.job.gradients),
        "gradient_tensors": len(study.job.gradients),
        "strategies": [asdict(strategy) for strategy in study.strategies],
        "points": points,
        "published": [
            _compare(study, result)
            for result in description.published
            if result.experiment == experiment.name
        ],
        "sensitivity": _sensitivity(study, description, largest),
        "quantities": {name: quantity.model_dump() for name, quantity in description.rates.items()},
    }
    folder = Path(experiment.run, "scale")
    files.write_json(folder / "scale.json", SCHEMA, report)
    files.write_bytes(folder / "scale.png", figure.draw(report))
    say(table(report))
    say(f"scale: wrote {folder / 'scale.json'} and {folder / 'scale.png'}")
    return report


def _points(study: Study, sweep: tuple[int, ...]) -> list[dict[str, Any]]:
    points = []
    for strategy in study.strategies:
        for ranks in sweep:
            steps = study.run(strategy, ranks)
            bound, parts = study.bound(strategy, ranks)
            points.append(
                {
                    "strategy": strategy.name,
                    "ranks": ranks,
                    "efficiency": study.efficiency(strategy, ranks),
                    "step_s": float(np.mean([step.duration for step in steps])),
                    "exposed_s": float(np.mean([step.exposed for step in steps])),
                    "negotiations": float(np.mean([step.cycles for step in steps])),
                    "allreduces": float(np.mean([step.operations for step in steps])),
                    "bound": bound,
                    "parts": parts,
                }
            )
    return points


def _compare(study: Study, result: Published) -> dict[str, Any]:
    compared = result.model_dump() | {"predicted": study.predicted(result)}
    if result.fits is not None:
        in_file = getattr(study.machine, result.fits)
        compared |= {"in_file": in_file, "fitted_now": study.fitted(result)}
    return compared


def _sensitivity(study: Study, description: Description, ranks: int) -> list[dict[str, Any]]:
    """Efficiency at `ranks` with each quantity halved and doubled."""
    found = []
    for name in QUANTITIES:
        value = getattr(study.machine, name)
        row: dict[str, Any] = {"quantity": name, "kind": description.rates[name].kind}
        for strategy in (MAIN, WORST):
            row[strategy] = [
                _on(study, {name: factor * value}).efficiency(study.strategy(strategy), ranks)
                for factor in (0.5, 2.0)
            ]
        found.append(row)
    return found


def table(report: Mapping[str, Any]) -> str:
    """The report as text: efficiencies, bounds, published figures, sensitivities."""
    sweep = sorted({point["ranks"] for point in report["points"]})
    by_name: dict[str, dict[int, Any]] = {}
    for point in report["points"]:
        by_name.setdefault(point["strategy"], {})[point["ranks"]] = point
    alone, size = report["step_alone_s"], files.human_bytes(report["gradient_bytes"])
    lines = [
        f"{report['experiment']} on {report['machine']}: {alone:.3f} s a step, {size} of gradients",
        "",
        f"{'efficiency':<24}{''.join(f'{ranks:>8,}' for ranks in sweep)}  bound at the end",
    ]
    for name, points in by_name.items():
        values = "".join(f"{points[ranks]['efficiency']:8.3f}" for ranks in sweep)
        lines.append(f"{name:<24}{values}  {points[sweep[-1]]['bound']}")
    if report["published"]:
        lines += ["", f"{'published':<42}{'ranks':>9}{'figure':>8}{'model':>8}"]
    for result in report["published"]:
        what = result["strategy"] + (f" over {result['over']}" if result["over"] else "")
        figures = f"{result['ranks']:>9,}{result['value']:8.2f}{result['predicted']:8.2f}"
        basis = f"fitted: {result['fits']}" if result["fits"] else "held out"
        lines.append(f"{what:<42}{figures}  {basis}")
    lines += ["", f"{'each quantity halved, doubled':<30}{MAIN:>18}{WORST:>18}"]
    for row in report["sensitivity"]:
        if max(abs(low - high) for low, high in (row[MAIN], row[WORST])) > figure.LEAST_SHOWN:
            values = "".join(f"{low:11.3f}{high:7.3f}" for low, high in (row[MAIN], row[WORST]))
            lines.append(f"  {row['quantity']:<18}{row['kind']:<10}{values}")
    return "\n".join(lines)
