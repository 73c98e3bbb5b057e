"""A rank of benchmarks/grouping.py: steps of an emulated device, reduced by Horovod.

    mpirun -n 4 python benchmarks/emulated_step.py CASE.json

Back-propagation waits until the time at which a gradient is due and then hands it on. Rank 0 prints
what all found as JSON.
"""

import json
import statistics
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

BURSTS = 25  # moments at which the emulated device hands on gradients
ALONE = "alone"  # among the planners: without reductions


def work(case: dict) -> None:
    """Steps with each planner in turn; `optimal` has the link measured before."""
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
    compared = "optimal" in case["planners"]
    cost = link.measure(here, gamma=True) if compared else None
    for name, tensors in case["sets"].items():
        gradients = bursts([grouping.Gradient(**each) for each in tensors])
        steps = {}
        for planner in case["planners"]:
            groups = None if planner == ALONE else grouping.plan(planner, gradients, cost)
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
        found = {"set": name, "step_s": medians}
        if compared:
            outlook = plan.Outlook(gradients, case["compute"], cost, here.size, "measured")
            planners = [planner for planner in case["planners"] if planner != ALONE]
            rows = {row["planner"]: row for row in plan.compare(outlook, planners)}
            found["link"] = asdict(cost)
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
    sys.path.insert(0, str(Path(__file__).parent.parent))
    work(json.loads(Path(sys.argv[1]).read_text()))
