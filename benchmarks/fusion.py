"""What a planner can win over Horovod's own fusion, under the alpha-beta model.

    python benchmarks/fusion.py

Horovod's fusion sends, whenever the network is free, all that is ready: it never looks ahead. Step
with it over step with `optimal`, for 1,000 gradients of equal size that appear one after another in
the last two thirds of the step. Rows: alpha, the cost of a reduction, as a part of the time to
compute. Columns: time of all bytes on the network, as a part of the time to compute. Nothing is
timed; the table is the same everywhere.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
COUNT = 1000
ALPHAS = (0.003, 0.01, 0.03, 0.1, 0.2, 0.3)
VOLUMES = (0.1, 0.3, 0.5, 0.7, 1.0, 1.5)


def main() -> None:
    from stemdl import files
    from stemdl.reduction.grouping import Gradient

    gradients = [Gradient(i, "layer", 1000, 1 - 2 / 3 * i / COUNT) for i in range(COUNT)]
    rows = [[gain(gradients, alpha, volume) for volume in VOLUMES] for alpha in ALPHAS]
    print("alpha   " + "".join(f"{volume:>7.1f}" for volume in VOLUMES) + "   bytes / compute")
    for alpha, row in zip(ALPHAS, rows, strict=True):
        print(f"{alpha:<8.3f}" + "".join(f"{each:>7.2f}" for each in row))
    result = {"alphas": ALPHAS, "volumes": VOLUMES, "fusion_over_optimal": rows}
    files.write_json(ROOT / "build/benchmarks/fusion.json", "stemdl.benchmark/1", result)


def gain(gradients: list, alpha: float, volume: float) -> float:
    """Step with fusion alone over step with `optimal`; the time to compute is 1."""
    from stemdl.reduction import grouping

    link = grouping.Link(alpha, volume / sum(each.bytes for each in gradients))
    apart = grouping.plan("none", gradients)
    fused = grouping.schedule(apart, gradients, link, fused=True)[-1].end
    best = grouping.end_of_communication(grouping.plan("optimal", gradients, link), gradients, link)
    return max(1.0, fused) / max(1.0, best)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
