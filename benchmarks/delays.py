"""Would a planner gain that expects gradients to come late? Under the alpha-beta-gamma model.

    python benchmarks/delays.py

`optimal` believes the measured ready times. When gradients come later, a large group leaves the
network idle until its last member is there, while smaller pieces would have been sent (and joined
again by Horovod's fusion where they wait for each other). Step with `optimal` over the step with
its groups cut into 2, 3 or 4 pieces of equal bytes, and over that with Horovod's fusion alone. Each
moment at which gradients appear is late by a random time (exponential, mean below); means over 50
draws. Below 1: `optimal` is quicker. Links are those measured by benchmarks/grouping.py on 2 cores.
Nothing is timed; the table is the same everywhere.
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
COMPUTE, TOTAL = 0.12, 1e6  # [s], [B], as in benchmarks/grouping.py
LINKS = {  # alpha [s], beta [s/B], gamma [s]
    "4 ranks, slow": (0.95e-3, 57.3e-9, 0.056e-3),
    "8 ranks, slow": (0.96e-3, 74.7e-9, 0.123e-3),
    "16 ranks, slow": (4.32e-3, 139.9e-9, 0.318e-3),
    "16 ranks, quick": (4.01e-3, 11.1e-9, 0.469e-3),
}
DELAYS = (0.0, 0.002, 0.006)  # mean [s]
PIECES = (2, 3, 4)
DRAWS = 50


def main() -> None:
    from emulated_step import bursts
    from grouping import papers_gradients, small_gradients

    from stemdl import files
    from stemdl.reduction import grouping

    rows = []
    for name, gradients_of in (("paper", papers_gradients), ("small", small_gradients)):
        given = [grouping.Gradient(**each) for each in gradients_of(COMPUTE, TOTAL)]
        gradients = bursts(given)
        for ranks, costs in LINKS.items():
            link = grouping.Link(*costs)
            plans = {"optimal": grouping.plan("optimal", gradients, link)}
            plans["none"] = grouping.plan("none", gradients)
            for count in PIECES:
                plans[f"{count} pieces"] = cut(plans["optimal"], gradients, count)
            for delay in DELAYS:
                steps = mean_steps(plans, gradients, link, delay)
                over = {plan: steps["optimal"] / step for plan, step in steps.items()}
                rows.append({"set": name, "link": ranks, "delay_s": delay, "optimal_over": over})
                ratios = ", ".join(
                    f"{plan} {over[plan]:.3f}" for plan in plans if plan != "optimal"
                )
                print(f"{name}, {ranks}, late by {delay * 1e3:.0f} ms: optimal over {ratios}")
    files.write_json(ROOT / "build/benchmarks/delays.json", "stemdl.benchmark/1", {"rows": rows})


def cut(groups: list[list[int]], gradients: list, count: int) -> list[list[int]]:
    """Each group in up to `count` pieces of about equal bytes, in its order."""
    from stemdl.reduction import grouping

    by_index = {each.index: each for each in gradients}
    members = ([by_index[index] for index in group] for group in groups)
    return [piece for each in members for piece in grouping.plan(f"equal:{count}", each)]


def mean_steps(plans: dict, gradients: list, link, delay: float) -> dict[str, float]:
    """Mean length of a step [s] with each plan, all with the same delays."""
    from stemdl.reduction import grouping

    rng = np.random.default_rng(0)
    moments = sorted({each.ready for each in gradients})
    steps: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(DRAWS):
        late = np.maximum.accumulate(moments + rng.exponential(1, len(moments)) * delay)
        ready = dict(zip(moments, late.tolist(), strict=True))
        delayed = [replace(each, ready=ready[each.ready]) for each in gradients]
        for name, groups in plans.items():
            last = grouping.schedule(groups, delayed, link, fused=True)[-1]
            steps[name].append(max(COMPUTE, last.end))
    return {name: float(np.mean(found)) for name, found in steps.items()}


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
