"""What the planners bring on real Horovod ranks, with a quick and with a rate-limited network.

    python benchmarks/grouping.py [--ranks 2 4 8 16] [--megabits 200] [--rounds 7]
    python benchmarks/grouping.py --ranks 8 --networks slow --sets paper --compute 0.02 --bytes 2e5
    python benchmarks/grouping.py --levers --ranks 4 8
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
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import numpy as np
from emulated_step import ALONE
from slow_network import FAST, Network, available, slow_network

ROOT = Path(__file__).parent.parent
WORKER = str(Path(__file__).with_name("emulated_step.py"))
PLANNERS = ("none", "layer", "equal:4", "bytes:0.2MB", "optimal")
# More ranks than cores: MPICH sleeps between looks for messages instead of holding a core.
GIVE_WAY = {
    "MPIR_CVAR_CH4_PROGRESS_THROTTLE": "1",
    "MPIR_CVAR_CH4_PROGRESS_THROTTLE_NO_PROGRESS_COUNT": "16",
}
CACHE = {"cache_capacity": 16_384}  # holds the names of all planners' tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--networks", nargs="+", default=["quick", "slow"], help="quick, slow")
    parser.add_argument("--sets", nargs="+", default=["paper", "small"], help="paper, small")
    parser.add_argument("--megabits", type=int, default=200, help="rate-limited network [Mbit/s]")
    parser.add_argument("--compute", type=float, default=0.12, help="emulated device's step [s]")
    parser.add_argument("--bytes", type=float, default=1e6, help="gradients of each set [B]")
    parser.add_argument("--rounds", type=int, default=7, help="steps with each planner")
    parser.add_argument("--levers", action="store_true", help="cache and fusion off instead")
    parser.add_argument("--negotiation", action="store_true", help="the cache's worth instead")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # namespaces are removed
    if options.negotiation:
        compare_cache(max(options.ranks), options.rounds)
        return
    sets = {"paper": papers_gradients, "small": small_gradients}
    case = {
        "reduction": CACHE,
        "planners": [ALONE, *PLANNERS],
        "compute": options.compute,
        "rounds": options.rounds,
        "sets": {name: sets[name](options.compute, options.bytes) for name in options.sets},
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
            result = {"compute_s": options.compute, "megabits": options.megabits, "cases": cases}
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


def papers_gradients(compute: float, total: float) -> list[dict]:
    """The paper's network's: order, ready times and sizes from its graph, scaled."""
    from stemdl import config
    from stemdl.reduction import expected
    from stemdl.reduction.timeline import Rates

    experiment = config.load(ROOT / "configs/summit.yaml")
    step = expected.expect(experiment, Rates(125e12, 900e9, 5e-6)).lasting(compute)
    share = total / sum(gradient.bytes for gradient in step.gradients)
    scaled = (asdict(gradient) for gradient in step.gradients)
    return [each | {"bytes": 4 * max(1, round(each["bytes"] * share / 4))} for each in scaled]


def small_gradients(compute: float, total: float, count: int = 1000) -> list[dict]:
    """Sizes over two decades, ready one after another in the last two thirds of the step."""
    sizes = np.random.default_rng(0).lognormal(0, 1, count)
    sizes *= total / sizes.sum()
    return [
        {
            "index": index,
            "scope": f"layer_{index // 4}",
            "bytes": 4 * max(1, round(size / 4)),
            "ready": compute * (1 - 2 / 3 * index / count),
        }
        for index, size in enumerate(sizes)
    ]


def start(ranks: int, network: Network, case: dict) -> dict:
    """Run the emulated steps on `ranks` processes; what rank 0 reports."""
    from stemdl.launch import local

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "case.json")
        path.write_text(json.dumps(case))
        program = network.command([sys.executable, WORKER, str(path)])
        done = subprocess.run(
            [local.mpirun(), "-n", str(ranks), *program],
            env=os.environ | network.environment | GIVE_WAY | {"TF_CPP_MIN_LOG_LEVEL": "2"},
            stdout=subprocess.PIPE,
            text=True,
            timeout=900,
            check=True,
        )
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
