"""Which groups a run reduces its gradients in, and what each planner would give it.

outlook = measure(model, shapes, experiment, ranks)      # or study.outlook(experiment): a model
groups = grouping.plan("optimal", outlook.gradients, outlook.link)
report(experiment, outlook)                              # RUN/plan/{plan.json,plan.png}, a table
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from stemdl import files
from stemdl.console import say
from stemdl.ranks import Ranks
from stemdl.reduction import expected, gantt, grouping, link, timeline
from stemdl.reduction.grouping import Gradient, Link
from stemdl.schema import Experiment

SCHEMA = "stemdl.plan/1"
PLANNERS = ("none", "layer", "equal:4", "bytes:25MB", "optimal")


@dataclass(frozen=True)
class Outlook:
    """A step's gradients and the cost of reducing them."""

    gradients: list[Gradient]
    compute: float  # forward and backward pass [s]
    link: Link
    ranks: int
    source: str  # "measured", or the machine that was modelled


def measure(
    model: keras.Model,
    shapes: tuple[Sequence[int], Sequence[int]],
    experiment: Experiment,
    ranks: Ranks,
    *,
    gamma: bool = False,
) -> Outlook:
    """Run a few steps and reductions on all ranks together; the same result on all of them.

    A gradient is ready when the last rank has it. Weights and statistics stay as they are. `gamma`:
    measure what `compare` needs to judge Horovod's fusion, too.
    """
    micro = experiment.train.batch // experiment.train.accumulate
    with ranks.together("measuring when gradients are ready"):
        batch = [tf.random.normal((micro, *shape)) for shape in shapes]
        gradients = timeline.of_model(model, expected.difference)
        clock = timeline.python_clock if experiment.train.deterministic else tf.timestamp
        here = timeline.measure(gradients, batch, clock=clock)
    ready = np.max(ranks.collect(here.ready), axis=0)
    end = max(ranks.collect(here.end))
    before = (experiment.train.accumulate - 1) * end
    wire = experiment.reduction.wire
    return Outlook(
        gradients=expected.describe(model, [before + float(each) for each in ready], wire),
        compute=before + end,
        link=link.measure(ranks, wire, gamma=gamma),
        ranks=ranks.size,
        source="measured",
    )


def groups(
    model: keras.Model,
    shapes: tuple[Sequence[int], Sequence[int]],
    experiment: Experiment,
    ranks: Ranks,
) -> list[list[int]]:
    """The groups of `reduction.planner`, the same on all ranks.

    Back-propagation yields the gradients of the last layers first; that is all that most planners
    need to know. `optimal` measures, once in a run: the groups are kept in RUN/groups.json, for
    other groups would round sums differently and a resumed run would part from the unbroken one.
    """
    planner, wire = experiment.reduction.planner, experiment.reduction.wire
    count = len(model.trainable_variables)
    in_reverse = expected.describe(model, [float(count - each) for each in range(count)], wire)
    if planner != "optimal":
        return grouping.plan(planner, in_reverse)
    path = experiment.run / "groups.json"
    asked = {"bytes": [each.bytes for each in in_reverse], "ranks": ranks.size}
    kept = None
    with ranks.together("reading the groups of gradients"):
        if ranks.rank == 0 and path.exists():
            kept = files.read_json(path, "stemdl.groups/1")
    kept = ranks.share(kept)
    if kept and all(kept[key] == value for key, value in asked.items()):
        return kept["groups"]
    outlook = measure(model, shapes, experiment, ranks)
    found = grouping.plan(planner, outlook.gradients, outlook.link)
    with ranks.together("writing the groups of gradients"):
        if ranks.rank == 0:
            measured = {"link": asdict(outlook.link), "groups": found}
            files.write_json(path, "stemdl.groups/1", asked | measured)
    return found


def compare(
    outlook: Outlook, planners: Sequence[str] = PLANNERS, *, group_fusion: bool = True
) -> list[dict[str, Any]]:
    """What the model expects of each planner; times in s.

    With `none` Horovod's fusion is all that joins gradients; with `group_fusion` it also joins
    groups that wait for each other.

    `over_bound` compares a step with the longer of the computation and of all bytes in one
    reduction; `over_limit` with what no grouping can undercut, given when the bytes are ready.
    """
    total = sum(gradient.bytes for gradient in outlook.gradients)
    limit = max(outlook.compute, grouping.limit(outlook.gradients, outlook.link))
    bound = max(outlook.compute, outlook.link.alpha + outlook.link.beta * total)
    rows = []
    for planner in planners:
        found = grouping.plan(planner, outlook.gradients, outlook.link)
        fused = planner == "none" or group_fusion
        transfers = grouping.schedule(found, outlook.gradients, outlook.link, fused=fused)
        step = max(outlook.compute, transfers[-1].end)
        rows.append(
            {
                "planner": planner,
                "groups": len(found),
                "reductions": len(transfers),
                "communication_s": sum(each.end - each.start for each in transfers),
                "exposed_s": step - outlook.compute,
                "step_s": step,
                "over_bound": step / bound,
                "over_limit": step / limit,
                "transfers": [asdict(each) for each in transfers],
            }
        )
    return rows


def report(experiment: Experiment, outlook: Outlook) -> dict[str, Any]:
    """Write RUN/plan/{plan.json,plan.png} and print the table; call on rank 0. Returns the JSON."""
    chosen = experiment.reduction.planner
    planners = [*PLANNERS, *([chosen] if chosen not in PLANNERS else [])]
    content: dict[str, Any] = {
        "experiment": experiment.name,
        "source": outlook.source,
        "ranks": outlook.ranks,
        "chosen": chosen,
        "compute_s": outlook.compute,
        "link": asdict(outlook.link),
        "gradients": [asdict(gradient) for gradient in outlook.gradients],
        "planners": compare(outlook, planners, group_fusion=experiment.reduction.group_fusion),
    }
    folder = Path(experiment.run, "plan")
    files.write_json(folder / "plan.json", SCHEMA, content)
    files.write_bytes(folder / "plan.png", gantt.draw(content))
    say(table(content))
    say(f"plan: wrote {folder / 'plan.json'} and {folder / 'plan.png'}")
    return content


def table(content: dict[str, Any]) -> str:
    """The comparison as text."""
    alpha, beta = content["link"]["alpha"], content["link"]["beta"]
    total = sum(gradient["bytes"] for gradient in content["gradients"])
    rate = f"{files.human_bytes(1 / beta)}/s" if beta else "no bandwidth limit"
    lines = [
        f"{content['experiment']}, {content['ranks']} ranks, {content['source']}: "
        f"{len(content['gradients'])} gradients, {files.human_bytes(total)}; "
        f"{content['compute_s'] * 1e3:.1f} ms to compute; "
        f"a reduction takes {alpha * 1e3:.2f} ms and {rate}",
        "",
        f"{'planner':<16}{'groups':>8}{'reductions':>12}"
        + "".join(
            f"{name:>12}" for name in ("reducing", "exposed", "step", "over bound", "over limit")
        ),
    ]
    for row in content["planners"]:
        times = "".join(
            f"{row[key] * 1e3:9.1f} ms" for key in ("communication_s", "exposed_s", "step_s")
        )
        mark = "  <- reduction.planner" if row["planner"] == content["chosen"] else ""
        lines.append(
            f"{row['planner']:<16}{row['groups']:>8}{row['reductions']:>12}{times}{row['over_bound']:>12.3f}"
            f"{row['over_limit']:>12.3f}{mark}"
        )
    return "\n".join(lines)
