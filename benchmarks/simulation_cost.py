"""How well data_tools.cost foretells what a sample takes, and what dealing by cost is worth.

    python benchmarks/simulation_cost.py [--samples 24]

For each setting the pace is measured once, on one material, as before a real run. Then samples of
other materials, thicknesses and zone axes are made and timed on one core. Reported: Spearman's rank
correlation of foretold and real seconds, the mean relative error, and the error of the sum (the
duration of a run). Targets, over all settings: error of a sample <= 10 %, of the sum <= 10 %.

Dealing: the shards of a data set with thicknesses from 20 to 200 Å to some numbers of ranks, by
cost and by count in turn; the longest share over the mean, by the foretold seconds.
"""

import argparse
import os
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

import numpy as np  # noqa: E402
from scipy.stats import spearmanr  # noqa: E402
from simulation import timed  # noqa: E402
from threadpoolctl import threadpool_limits  # noqa: E402

from data_tools import cost, forecast, jobs, structures  # noqa: E402
from data_tools.sample import Recipe, simulate_sample  # noqa: E402
from stemdl import files, schema  # noqa: E402

TARGET = Path(__file__).parent.parent / "build/benchmarks/simulation_cost.json"
SETTINGS = {
    "defaults, 20 to 80 Å": {"thickness": (20, 80)},
    "the same, with a dose": {"thickness": (20, 80), "dose": 1e5},
    "small box, few pixels": {"thickness": (20, 80), "box": 16, "detector": (15, 15)},
    "fine grid": {"thickness": (20, 80), "grid": 0.1, "scan": (6, 6)},
    "wide box": {"thickness": (20, 80), "box": 48, "grid": 0.125, "scan": (5, 5)},
}
RANKS = (4, 16, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=24, help="timed, a setting")
    options = parser.parse_args()
    catalogue = structures.collect(schema.Materials())
    rows = []
    with threadpool_limits(1):
        for name, keys in SETTINGS.items():
            row = compare(catalogue.materials, schema.Simulate(**keys), options.samples)
            rows.append({"name": name} | row)
            print(
                f"{name:24s} {row['seconds_a_sample']:.3f} s a sample ({row['range'][0]:.2f} to "
                f"{row['range'][1]:.2f}), Spearman {row['spearman']:.3f}, error of a sample "
                f"{row['error']:.1%}, of the sum {row['error_of_sum']:+.1%}",
                flush=True,
            )
        balance = dealing(catalogue.materials)
    for ranks, (by_cost, by_count) in balance.items():
        print(
            f"{ranks:3d} ranks: longest share over the mean {by_cost:.3f} by cost, "
            f"{by_count:.3f} by count"
        )
    files.write_json(TARGET, "stemdl.benchmark/1", {"settings": rows, "longest_share": balance})
    print(f"wrote {TARGET}")


def compare(materials, settings: schema.Simulate, count: int) -> dict:
    """Foretold and real seconds of samples that cycle through the materials in random order."""
    recipe, chosen = prepared(materials, settings)
    order = np.random.default_rng(0).permutation(len(chosen))
    pace = cost.measure(recipe, chosen[order[-1]], "train", 0)
    tasks = [
        (recipe, chosen[order[n % len(chosen)]], "train", len(structures.SPLITS) * n)
        for n in range(count)
    ]
    foretold = np.array([cost.of_sample(*task) @ pace for task in tasks])
    real = np.array([timed(simulate_sample, *task)[1] for task in tasks])
    return {
        "samples": count,
        "seconds_a_sample": real.mean(),
        "range": [real.min(), real.max()],
        "spearman": spearmanr(foretold, real).statistic,
        "error": np.mean(np.abs(foretold / real - 1)),
        "error_of_sum": foretold.sum() / real.sum() - 1,
        "pace": pace,
    }


def dealing(materials) -> dict[int, list[float]]:
    """The longest share over the mean: [by cost, by count]."""
    settings = schema.Simulate(
        thickness=(20, 200), shard_samples=4, samples={"train": 800, "dev": 40, "test": 100}
    )
    recipe, _ = prepared(materials, settings)
    splits = structures.split(materials, settings.materials, settings.seed)
    pace = cost.measure(recipe, splits["train"][0], "train", 0)
    every = jobs.all_jobs(settings, Path())
    seconds = np.array([cost.of_samples(jobs.tasks(recipe, splits, job)) @ pace for job in every])
    found = {}
    for ranks in RANKS:
        in_turn = max(seconds[rank::ranks].sum() for rank in range(ranks))
        mean = seconds.sum() / ranks
        found[ranks] = [forecast.divide(seconds, 1, ranks).wall / mean, in_turn / mean]
    return found


def prepared(materials, settings: schema.Simulate):
    splits = structures.split(materials, settings.materials, settings.seed)
    return Recipe(settings, structures.natural_splits(splits)), splits["train"]


if __name__ == "__main__":
    main()
