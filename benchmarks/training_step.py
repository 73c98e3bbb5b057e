"""What our training step costs over a bare one, and what a second rank brings.

    python benchmarks/training_step.py [--steps 60] [--rounds 5]

1. overhead: time of our step (loss scaling, finiteness, timing, sums) on one rank over that of a
   bare tf.function of the same network, loss and Adam. Target: <= 1.05.
2. efficiency: samples/s of two ranks of one core each over twice those of one rank of one core, at
   the same batch a rank. Target: >= 0.90. Beside it the same for two processes that train alone
   at the same time: what the machine's memory and cores allow without any reduction.

Rounds of what is compared alternate, so that a slow moment of the machine hits both; medians count.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
CBED, POTENTIAL = (12, 12, 31, 31), (48, 48)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="steps in a round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; medians are reported")
    parser.add_argument("--worker", choices=("overhead", "ranks", "apart"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker == "overhead":
        print(json.dumps(overhead(options.steps, options.rounds)))
    elif options.worker:
        rate = samples_per_second(options.steps, reduce=options.worker == "ranks")
        if rate is not None:
            print(json.dumps(rate))
    else:
        compare(options.steps, options.rounds)


def compare(steps: int, rounds: int) -> None:
    """Run both comparisons in fresh processes, print the ratios and write them as JSON."""
    sys.path.insert(0, str(ROOT))
    from stemdl import files

    ours, bare = worker(1, "overhead", steps, rounds)
    cases = ((1, "ranks"), (2, "ranks"), (2, "apart"))
    rates: list[list[float]] = [[], [], []]
    for _ in range(rounds):
        for (ranks, what), measured in zip(cases, rates, strict=True):
            measured.append(worker(ranks, what, steps, rounds))
    one, two, apart = map(statistics.median, rates)
    result = {
        "ours_ms": 1e3 * ours,
        "bare_ms": 1e3 * bare,
        "overhead": ours / bare,
        "one_rank_samples_per_s": one,
        "two_ranks_samples_per_s": two,
        "two_apart_samples_per_s": apart,
        "efficiency": two / (2 * one),
        "efficiency_apart": apart / (2 * one),
    }
    print(
        f"step: ours {result['ours_ms']:.1f} ms, bare {result['bare_ms']:.1f} ms, "
        f"ratio {result['overhead']:.3f} (target <= 1.05)"
    )
    print(
        f"ranks: 1 does {one:.1f} samples/s, 2 do {two:.1f} samples/s, "
        f"efficiency {result['efficiency']:.3f} (target >= 0.90); "
        f"2 that train alone: {result['efficiency_apart']:.3f}"
    )
    target = ROOT / "build/benchmarks/training_step.json"
    files.write_json(target, "stemdl.benchmark/1", result)
    print(f"wrote {target}")


def worker(ranks: int, what: str, steps: int, rounds: int):
    """Run this file's worker on `ranks` processes; what rank 0 printed."""
    from stemdl.launch import local

    launcher = [local.mpirun(), "-n", str(ranks)]
    arguments = ["--worker", what, "--steps", str(steps), "--rounds", str(rounds)]
    done = subprocess.run(
        [*launcher, sys.executable, __file__, *arguments],
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def build(reduce: bool = True):
    """(experiment, ranks, model, our step, a batch) of the demo, on one core of its own.

    Without `reduce` each rank trains as if it were alone.
    """
    import tensorflow as tf

    from stemdl import config, ranks
    from stemdl.reduction import levers, plan
    from stemdl.training import devices
    from stemdl.training.state import State
    from stemdl.training.step import training_step

    here = ranks.discover()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[here.rank % len(cores)]})
    experiment = config.load(ROOT / "configs/demo.yaml", ["train.threads=1"])
    devices.set_up(experiment.train, experiment.seed, here)
    levers.start(experiment.reduction, here)
    team = here if reduce else ranks.Ranks()
    state = State(experiment, (CBED, POTENTIAL), 100, team)
    groups = plan.groups(state.model, (CBED, POTENTIAL), experiment, team)
    step = training_step(state, groups, experiment, team)
    count = experiment.train.batch
    batch = {
        "cbed": tf.random.stateless_normal((count, *CBED), (here.rank, 1)),
        "potential": tf.random.stateless_normal((count, *POTENTIAL), (here.rank, 2)),
        "weight": tf.ones(count),
    }
    return experiment, here, state.model, step, batch


def seconds_a_step(run: Callable[[], object], steps: int) -> float:
    begun = time.perf_counter()
    for _ in range(steps):
        run()
    return (time.perf_counter() - begun) / steps


def overhead(steps: int, rounds: int) -> tuple[float, float]:
    """Median seconds of our step and of a bare one."""
    import keras
    import tensorflow as tf

    experiment, _, model, step, batch = build()
    options = experiment.train.optimizer
    adam = keras.optimizers.Adam(options.lr, ema_momentum=experiment.train.ema or 0.99)
    adam.use_ema = experiment.train.ema is not None
    adam.build(model.trainable_variables)

    @tf.function
    def bare() -> None:
        with tf.GradientTape() as tape:
            predicted = model(batch["cbed"], training=True)
            loss = tf.reduce_mean(tf.abs(predicted - batch["potential"]))
        gradients = tape.gradient(loss, [each.value for each in model.trainable_variables])
        adam.apply(gradients)

    number = tf.constant(7, tf.int64)
    runs = (lambda: step(batch, number), bare)
    times: list[list[float]] = [[], []]
    for run in runs:
        seconds_a_step(run, 3)
    for _ in range(rounds):
        for run, spent in zip(runs, times, strict=True):
            spent.append(seconds_a_step(run, steps))
    return statistics.median(times[0]), statistics.median(times[1])


def samples_per_second(steps: int, *, reduce: bool) -> float | None:
    """All ranks' samples/s, on rank 0; None on the others."""
    import tensorflow as tf

    experiment, here, _, step, batch = build(reduce)
    number = tf.constant(7, tf.int64)
    seconds_a_step(lambda: step(batch, number), 5)
    here.barrier()
    seconds = max(here.collect(seconds_a_step(lambda: step(batch, number), steps)))
    return here.size * experiment.train.batch / seconds if here.rank == 0 else None


if __name__ == "__main__":
    main()
