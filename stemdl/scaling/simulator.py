"""One training step on N ranks, event by event.

    step = simulate(machine, job, strategy, ranks=27_600, generator)

All ranks start together, for the reduction before held them together. Each computes at its own
speed. Horovod's background threads wake in cycles: they agree on what is ready everywhere (by rank
0, the coordinator, or by a bitwise AND over all ranks, the bitvector), fuse it, and reduce it piece
by piece while back-propagation goes on. The step ends when all gradients have been reduced, the
slowest rank has finished, the weights are updated, and the next input has been read.

A rank's times are those of an average rank times one number (its speed, and this step's noise). So
N sorted numbers say how many requests have been made by any time; no rank is simulated by itself.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from stemdl.reduction import grouping
from stemdl.reduction.grouping import Gradient, Link
from stemdl.scaling.machine import Across, Machine, allreduce, steps_of

Coordination = Literal["coordinator", "bitvector"]


@dataclass(frozen=True)
class Strategy:
    """How a job reduces and reads."""

    name: str
    coordination: Coordination
    planner: str  # as reduction.planner; none: no groups
    across: Across = "tree"
    hierarchical: bool = True
    global_input: bool = False  # read from the global file system instead of the node's disk
    cycle: float = 1e-3  # [s]
    fusion: float = 128 * 2**20  # fusion buffer [B]
    group_fusion: bool = True


@dataclass(frozen=True)
class Job:
    """One rank's work in a step, at average speed."""

    gradients: tuple[Gradient, ...]  # with ready times [s] and bytes on the wire
    compute: float  # forward and backward pass [s]
    update: float  # optimizer [s]
    input_bytes: float  # read from disk [B]


@dataclass(frozen=True)
class Step:
    """What happened in one step."""

    duration: float  # [s]
    compute: float  # of the slowest rank [s]
    exposed: float  # reduction after the slowest rank's back-propagation [s]
    cycles: int  # in which something was negotiated
    operations: int  # allreduces, after fusion


def speeds(machine: Machine, ranks: int, generator: np.random.Generator) -> np.ndarray:
    """How much longer than average each rank takes, sorted (ranks,). One rank is average."""
    if ranks == 1:
        return np.ones(1)
    own = 1 + machine.speed_spread * generator.standard_normal(ranks)
    noise = 1 + machine.step_spread * generator.standard_normal(ranks)
    return np.sort(np.maximum(own * noise, 0.0))


def link(machine: Machine, strategy: Strategy, ranks: int) -> Link:
    """The alpha-beta cost that the planner `optimal` works with, from the machine's numbers."""
    alpha, one_byte = (_allreduce(machine, strategy, ranks, size) for size in (0.0, 1.0))
    agreement = negotiation(machine, strategy, ranks, messages=0)
    return Link(alpha + agreement + machine.launch, one_byte - alpha)


def negotiation(machine: Machine, strategy: Strategy, ranks: int, messages: float) -> float:
    """Time of one agreement [s], in which rank 0 gets `messages` requests if it coordinates."""
    latency = steps_of("tree", ranks) * machine.network_latency
    return latency + (machine.message * messages if strategy.coordination == "coordinator" else 0.0)


def _allreduce(machine: Machine, strategy: Strategy, ranks: int, size: float) -> float:
    across, hierarchical = strategy.across, strategy.hierarchical
    return allreduce(machine, ranks, size, across=across, hierarchical=hierarchical)


def simulate(
    machine: Machine,
    job: Job,
    strategy: Strategy,
    ranks: int,
    generator: np.random.Generator,
) -> Step:
    """Run one step. `generator` draws the ranks' speeds."""
    slowness = speeds(machine, ranks, generator)
    slowest = job.compute * float(slowness[-1])
    end, cycles, operations = 0.0, 0, 0
    if ranks > 1:
        end, cycles, operations = _reduce(machine, job, strategy, ranks, slowness)
    computed = max(slowest, end) + job.update
    return Step(
        duration=max(computed, _input(machine, job, strategy, ranks)),
        compute=slowest + job.update,
        exposed=max(end - slowest, 0.0),
        cycles=cycles,
        operations=operations,
    )


def _input(machine: Machine, job: Job, strategy: Strategy, ranks: int) -> float:
    """Time to read a step's input; it is prefetched while the step before computes [s]."""
    if strategy.global_input:
        return ranks * job.input_bytes / (machine.global_read * machine.global_use)
    return min(ranks, machine.ranks_per_node) * job.input_bytes / machine.local_read


def _reduce(
    machine: Machine, job: Job, strategy: Strategy, ranks: int, slowness: np.ndarray
) -> tuple[float, int, int]:
    """(end of the last allreduce [s], cycles, allreduces)."""
    gradients = list(job.gradients)
    groups = grouping.plan(strategy.planner, gradients, link(machine, strategy, ranks))
    base = np.array([gradient.ready for gradient in gradients])
    sizes = np.array([gradient.bytes for gradient in gradients], float)
    # A group is ready when the slowest rank has its last member.
    ready = np.array([base[group].max() for group in groups]) * slowness[-1]
    group_bytes = np.array([sizes[group].sum() for group in groups])
    waiting = np.argsort(ready, kind="stable")

    time = channel = 0.0
    asked, cycles, operations = 0, 0, 0
    while waiting.size:
        now = waiting[ready[waiting] <= time]
        messages = 0
        if strategy.coordination == "coordinator":
            # Each rank asks once for each tensor, when it has it.
            total = int(np.searchsorted(slowness, time / np.maximum(base, 1e-12), "right").sum())
            messages, asked = total - asked, total
        if now.size == 0 and messages == 0:
            time = _next_cycle(time, ready[waiting[0]], slowness, base, strategy)
            continue
        agreed = time + negotiation(machine, strategy, ranks, messages)
        cycles += 1
        for size in _fuse(group_bytes[now], strategy):
            start = max(channel, agreed) + machine.launch
            channel = start + _allreduce(machine, strategy, ranks, size)
            operations += 1
        waiting = waiting[now.size :]
        # Across nodes MPI reduces, and the background thread waits for it.
        busy = channel if strategy.hierarchical and now.size else agreed
        time = max(time + strategy.cycle, busy)
    return channel, cycles, operations


def _next_cycle(
    time: float, ready: float, slowness: np.ndarray, base: np.ndarray, strategy: Strategy
) -> float:
    """The first cycle after `time` at which there is something to do."""
    wanted = ready
    if strategy.coordination == "coordinator":
        first = base * slowness[0]  # the fastest rank asks first
        later = first[first > time]
        wanted = min(ready, later.min()) if later.size else time
    return time + max(1.0, np.ceil((wanted - time) / strategy.cycle)) * strategy.cycle


def _fuse(sizes: np.ndarray, strategy: Strategy) -> list[float]:
    """Bytes of each allreduce: groups in order, joined as long as they fit the fusion buffer."""
    if strategy.planner != "none" and not strategy.group_fusion:
        return sizes.tolist()
    fused: list[float] = []
    for size in sizes.tolist():
        if fused and fused[-1] + size <= strategy.fusion:
            fused[-1] += size
        else:
            fused.append(size)
    return fused
