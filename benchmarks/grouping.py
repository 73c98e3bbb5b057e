"""What the planners bring on real Horovod ranks, with a quick and with a rate-limited network.

    python benchmarks/grouping.py [--ranks 2 4 8 16] [--megabits 200] [--rounds 7]
    python benchmarks/grouping.py --levers --ranks 8
    python benchmarks/grouping.py --negotiation

The device is emulated: back-propagation waits until the time at which a gradient is due and then
hands it on, as a GPU does that needs no host. Reductions are real. Two sets of gradients: those of
the paper's network with fewer bytes, and a network of 1,000 small tensors.

1. step: time of a step with each planner; ratio of `none` to it. Targets: `optimal` within 2 % of
   the best planner, and >= 1.15 with the rate-limited network.
2. bound: step with `optimal` over max(compute, one reduction of everything). Target in the model:
   <= 1.10; the measured figure is beside it, and the same over what is possible at all, given when
   the gradients are ready (limit).
3. levers (--levers): the same steps with Horovod's response cache off, and with its fusion off.
4. negotiation (--negotiation): time of a step of 1,000 tensors of one number, on the largest of
   --ranks, without and with Horovod's response cache.

`alone` is the step without reductions: what the emulation takes by itself. Planners take turns,
step by step, so that a slow moment of the machine hits all; medians count.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from slow_network import FAST, Network, available, slow_network

ROOT = Path(__file__).parent.parent
COMPUTE = 0.12  # emulated forward and backward pass [s]
TOTAL = 1.0e6  # gradients of each set [B]
PLANNERS = ("none", "layer", "equal:4", "bytes:0.2MB", "optimal")
# More ranks than cores: MPICH sleeps between looks for messages instead of holding a core.
GIVE_WAY = {
    "MPIR_CVAR_CH4_PROGRESS_THROTTLE": "1",
    "MPIR_CVAR_CH4_PROGRESS_THROTTLE_NO_PROGRESS_COUNT": "16",
}
BURSTS = 25  # moments at which the emulated device hands on gradients
CACHE = {"cache_capacity": 16_384}  # holds the names of all planners' tensors
ALONE = "alone"  # among the planners: without reductions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--networks", nargs="+", default=["quick", "slow"], help="quick, slow")
    parser.add_argument("--sets", nargs="+", default=["paper", "small"], help="paper, small")
    parser.add_argument("--megabits", type=int, default=200, help="rate-limited network [Mbit/s]")
    parser.add_argument("--rounds", type=int, default=7, help="steps with each planner")
    parser.add_argument("--levers", action="store_true", help="cache and fusion off instead")
    parser.add_argument("--negotiation", action="store_true", help="the cache's worth instead")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(json.loads(options.worker.read_text()))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # namespaces are removed
    if options.negotiation:
        compare_cache(max(options.ranks), options.rounds)
        return
    sets = {"paper": papers_gradients, "small": small_gradients}
    case = {
        "reduction": CACHE,
        "planners": PLANNERS,
        "compute": COMPUTE,
        "rounds": options.rounds,
        "sets": {name: sets[name]() for name in options.sets},
    }
    if options.levers:
        compare_levers(options, case)
    else:
        compare_planners(options, case)


def compare_planners(options: argparse.Namespace, case: dict) -> None:
    """All cases; prints the table and writes JSON."""
    from stemdl import files

    if "slow" in options.networks and not available():
        sys.exit("the slow network needs root, ip and tc; --networks quick does without")
    target = ROOT / "build/benchmarks/grouping.json"
    cases = []
    for ranks in options.ranks:
        for kind in options.networks:
            network = slow_network(ranks, options.megabits) if kind == "slow" else nullcontext(FAST)
            with network as ways:
                found = start(ranks, ways, case)
            common = {"ranks": ranks, "network": kind, "plain_MB_s": found["plain_MB_s"]}
            for each in found["sets"]:
                cases.append(common | each)
                print(line(cases[-1]), flush=True)
            result = {"compute_s": COMPUTE, "megabits": options.megabits, "cases": cases}
            files.write_json(target, "stemdl.benchmark/1", result)
    print(f"wrote {target}")


def line(row: dict) -> str:
    none = row["step_s"]["none"]
    planned = {name: row["step_s"][name] for name in PLANNERS}
    ratios = "  ".join(f"{name} {none / time:.2f}" for name, time in planned.items())
    best = min(planned.values())
    return (
        f"{row['ranks']:>2} ranks, {row['network']} network ({row['plain_MB_s']:.0f} MB/s plain), "
        f"{row['set']}: alone {row['step_s'][ALONE] * 1e3:.0f} ms, none {none * 1e3:.0f} ms; "
        f"none over {ratios}; "
        f"optimal over best {row['step_s']['optimal'] / best:.3f}; "
        f"over bound {row['measured_over_bound']:.2f} (model {row['model_over_bound']:.2f}), "
        f"over limit {row['measured_over_limit']:.2f} (model {row['model_over_limit']:.2f})"
    )


def compare_levers(options: argparse.Namespace, case: dict) -> None:
    """Each lever of Horovod's off, on the quick network; a start for each."""
    from stemdl import files

    levers = {
        "all on": {},
        "cache off": {"cache_capacity": 0},
        "fusion off": {"fusion_threshold": 0},
    }
    cases = []
    for ranks in options.ranks:
        for lever, changed in levers.items():
            found = start(ranks, FAST, case | {"reduction": CACHE | changed})
            for each in found["sets"]:
                cases.append({"ranks": ranks, "lever": lever} | each)
                steps = each["step_s"].items()
                times = ", ".join(f"{name} {time * 1e3:.0f}" for name, time in steps)
                print(f"{ranks:>2} ranks, {each['set']}, {lever}: {times} ms", flush=True)
    files.write_json(ROOT / "build/benchmarks/levers.json", "stemdl.benchmark/1", {"cases": cases})


def compare_cache(ranks: int, rounds: int) -> None:
    """Negotiation of 1,000 tensors, cache off and on; a start for each."""
    from stemdl import files

    tensors = [{"index": i, "scope": "s", "bytes": 4, "ready": 0.0} for i in range(1000)]
    case = {"rounds": rounds, "planners": ["none"], "compute": 0.0, "sets": {"1000": tensors}}
    off, on = (
        start(ranks, FAST, case | {"reduction": lever})["sets"][0]["step_s"]["none"]
        for lever in ({"cache_capacity": 0}, CACHE)
    )
    message = (off - on) / (ranks * len(tensors))
    print(
        f"{ranks} ranks, 1,000 tensors: cache off {off * 1e3:.0f} ms, on {on * 1e3:.0f} ms a step, "
        f"ratio {off / on:.2f}; {message * 1e6:.2f} μs for each rank's request for a tensor"
    )
    result = {"ranks": ranks, "off_s": off, "on_s": on, "ratio": off / on, "message_s": message}
    files.write_json(ROOT / "build/benchmarks/negotiation.json", "stemdl.benchmark/1", result)


def papers_gradients() -> list[dict]:
    """The paper's network's: order, ready times and sizes from its graph, scaled."""
    from stemdl import config
    from stemdl.reduction import expected
    from stemdl.reduction.timeline import Rates

    experiment = config.load(ROOT / "configs/summit.yaml")
    step = expected.expect(experiment, Rates(125e12, 900e9, 5e-6)).lasting(COMPUTE)
    share = TOTAL / sum(gradient.bytes for gradient in step.gradients)
    scaled = (asdict(gradient) for gradient in step.gradients)
    return [each | {"bytes": 4 * max(1, round(each["bytes"] * share / 4))} for each in scaled]


def small_gradients(count: int = 1000) -> list[dict]:
    """Sizes over two decades, ready one after another in the last two thirds of the step."""
    sizes = np.random.default_rng(0).lognormal(0, 1, count)
    sizes *= TOTAL / sizes.sum()
    return [
        {
            "index": index,
            "scope": f"layer_{index // 4}",
            "bytes": 4 * max(1, round(size / 4)),
            "ready": COMPUTE * (1 - 2 / 3 * index / count),
        }
        for index, size in enumerate(sizes)
    ]


def start(ranks: int, network: Network, case: dict) -> dict:
    """Run this file's worker on `ranks` processes; what rank 0 reports."""
    from stemdl.launch import local

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "case.json")
        path.write_text(json.dumps(case))
        program = network.command([sys.executable, __file__, "--worker", str(path)])
        done = subprocess.run(
            [local.mpirun(), "-n", str(ranks), *program],
            env=os.environ | network.environment | GIVE_WAY | {"TF_CPP_MIN_LOG_LEVEL": "2"},
            stdout=subprocess.PIPE,
            text=True,
            timeout=900,
            check=True,
        )
    return json.loads(done.stdout.splitlines()[-1])


def work(case: dict) -> None:
    """One rank: measure the link, then steps with each planner in turn."""
    import tensorflow as tf

    from stemdl import ranks, schema
    from stemdl.reduction import grouping, levers, link, plan

    here = ranks.discover()
    tf.get_logger().setLevel("ERROR")  # each planner's step is traced once, as it must be
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})  # starts sooner
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    levers.start(schema.Reduction(**case["reduction"]), here)
    report = {"plain_MB_s": plain_allreduce(here), "sets": []}
    cost = link.measure(here)
    for name, tensors in case["sets"].items():
        gradients = bursts([grouping.Gradient(**each) for each in tensors])
        steps = {ALONE: emulated_step(gradients, None, here, ALONE)}
        for planner in case["planners"]:
            groups = grouping.plan(planner, gradients, cost)
            steps[planner] = emulated_step(gradients, groups, here, planner)
        times: dict[str, list[float]] = {planner: [] for planner in steps}
        for turn in range(2 + case["rounds"]):
            for planner, step in steps.items():
                here.barrier()
                begun = time.perf_counter()
                step()
                spent = max(here.collect(time.perf_counter() - begun))
                if turn >= 2:  # Horovod's cache is full
                    times[planner].append(spent)
        medians = {planner: statistics.median(found) for planner, found in times.items()}
        found = {"set": name, "step_s": medians, "link": asdict(cost)}
        if "optimal" in medians:
            outlook = plan.Outlook(gradients, case["compute"], cost, here.size, "measured")
            rows = {row["planner"]: row for row in plan.compare(outlook, case["planners"])}
            found["model_step_s"] = {planner: row["step_s"] for planner, row in rows.items()}
            found["groups"] = {planner: row["groups"] for planner, row in rows.items()}
            found["reductions"] = {planner: row["reductions"] for planner, row in rows.items()}
            slower = medians["optimal"] / rows["optimal"]["step_s"]
            for of in ("over_bound", "over_limit"):
                found[f"model_{of}"] = rows["optimal"][of]
                found[f"measured_{of}"] = rows["optimal"][of] * slower
        report["sets"].append(found)
    if here.rank == 0:
        print(json.dumps(report))


def plain_allreduce(here) -> float:
    """MPI's own allreduce of 4 MB, best of 5 [MB/s of one rank's bytes]."""
    values = np.zeros(10**6, np.float32)
    spans = []
    for _ in range(5):
        here.barrier()
        begun = time.perf_counter()
        here.comm.Allreduce(values, np.empty_like(values))
        spans.append(max(here.collect(time.perf_counter() - begun)))
    return values.nbytes / min(spans) / 1e6


def bursts(gradients: list) -> list:
    """Ready times rounded up to at most BURSTS moments, as the emulated device hands them on."""
    moment = max(gradient.ready for gradient in gradients) / BURSTS or 1.0
    return [
        replace(gradient, ready=moment * np.ceil(gradient.ready / moment - 1e-9))
        for gradient in gradients
    ]


def emulated_step(gradients: list, groups: list[list[int]] | None, here, name: str):
    """A tf.function that waits for each moment, hands on its gradients and reduces the groups."""
    import tensorflow as tf

    from stemdl.reduction import allreduce

    at: dict[float, list] = {}  # moment -> gradients
    for gradient in gradients:
        at.setdefault(gradient.ready, []).append(gradient)
    sizes = {moment: [each.bytes // 4 for each in found] for moment, found in at.items()}
    values = {moment: tf.random.normal((sum(found),)) for moment, found in sizes.items()}
    zero, begun = tf.zeros(()), [0.0]

    def wait(_before: np.ndarray, until: np.ndarray) -> np.ndarray:
        time.sleep(max(begun[0] + float(until) - time.perf_counter(), 0))
        return np.float32(0)

    @tf.function(autograph=False)
    def step(token: tf.Tensor) -> tf.Tensor:
        handed: dict[int, tf.Tensor] = {}
        for moment in sorted(at):
            token = tf.numpy_function(wait, [token, moment], tf.float32, stateful=False)
            parts = tf.split(values[moment] + tf.ensure_shape(token, ()), sizes[moment])
            for gradient, part in zip(at[moment], parts, strict=True):
                handed[gradient.index] = part
        ordered = [handed[index] for index in range(len(gradients))]
        if groups is None:
            return tf.add_n([each[0] for each in ordered])
        reduced = allreduce.average(ordered, groups, size=here.size, name=name.replace(":", "_"))
        return tf.add_n([each[0] for each in reduced])

    def run() -> None:
        begun[0] = time.perf_counter()
        step(zero).numpy()

    return run


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
