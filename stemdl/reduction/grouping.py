"""Which gradients travel together.

A planner takes the gradients of one step, with the time at which back-propagation yields each, and
returns groups: lists of gradient indices in the order in which the groups are sent. Every gradient
is in exactly one group and no group is empty. One group is one tensor to Horovod, which reduces it
when it is ready on all ranks.

    groups = plan("optimal", gradients, Link(alpha=2e-4, beta=1e-9))

The model: groups are reduced one after another, as Horovod's background thread does; a group starts
when its last member is ready and the group before it has ended, and takes alpha + beta * bytes.
Horovod's fusion (`fused`) joins the groups that wait when the network becomes free; each then costs
gamma besides. The result is a grouping too, found without looking ahead: it never beats `optimal`.
"""

from dataclasses import dataclass

from stemdl.errors import UserError
from stemdl.schema import PLANNER


@dataclass(frozen=True)
class Gradient:
    """One gradient of a step. `index` is its place in the list of trainable variables."""

    index: int
    scope: str  # layer that owns the variable, such as "dense_0/layer_1"
    bytes: int  # on the wire
    ready: float  # after the start of the step [s]; without a timeline: its place in the order


@dataclass(frozen=True)
class Link:
    """Cost of one reduction over the ranks at hand: alpha + beta * bytes."""

    alpha: float  # per reduction: negotiation and latency [s]
    beta: float  # per byte of a rank's gradients [s/B]
    gamma: float = 0.0  # per tensor that Horovod joins to a reduction after its first [s]


@dataclass(frozen=True)
class Transfer:
    """One reduction under the model. Times after the start of the step [s]."""

    group: list[int]  # of gradients; Horovod may have joined several groups
    bytes: int
    ready: float
    start: float
    end: float


_UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def plan(planner: str, gradients: list[Gradient], link: Link | None = None) -> list[list[int]]:
    """Group the gradients; within and between groups, what is ready first comes first.

    - none: each gradient alone, so that only Horovod's own fusion joins them;
    - layer: one group for each scope, the published technique;
    - equal:N: at most N runs of gradients in ready order, of about equal bytes;
    - bytes:SIZE: runs in ready order, closed before they outgrow SIZE (a larger gradient is alone);
    - optimal: ends the communication soonest under `link`.

    Args:
        planner: as `reduction.planner` in the experiment file, which checks its grammar.
        gradients: each index once, in any order.
        link: cost of a reduction; only `optimal` needs it.

    Raises:
        UserError: `planner` is optimal and there is no link.
        ValueError: `planner` is none of these.
    """
    ordered = sorted(gradients, key=lambda gradient: (gradient.ready, gradient.index))
    parts = PLANNER.fullmatch(planner)
    if parts is None:
        raise ValueError(f"unknown planner {planner!r}")
    if planner == "none":
        runs = [[gradient] for gradient in ordered]
    elif planner == "layer":
        runs = _by_scope(ordered)
    elif parts["count"]:
        runs = _equal(ordered, int(parts["count"]))
    elif parts["size"]:
        runs = _up_to(ordered, float(parts["size"]) * _UNITS[parts["unit"]])
    elif link is None:
        raise UserError("reduction.planner is 'optimal', which needs the cost of a reduction")
    else:
        runs = _optimal(ordered, link)
    return [[gradient.index for gradient in run] for run in runs]


def schedule(
    groups: list[list[int]], gradients: list[Gradient], link: Link, *, fused: bool = False
) -> list[Transfer]:
    """When the groups would be reduced, in the order given; `fused`: with Horovod's fusion."""
    by_index = {gradient.index: gradient for gradient in gradients}
    ready = [max(by_index[index].ready for index in group) for group in groups]
    transfers: list[Transfer] = []
    free, first = 0.0, 0
    while first < len(groups):
        start = max(ready[first], free)
        last = first + 1
        while fused and last < len(groups) and ready[last] <= start:
            last += 1
        sent = [index for group in groups[first:last] for index in group]
        size = sum(by_index[index].bytes for index in sent)
        free = start + link.alpha + link.beta * size + link.gamma * (last - first - 1)
        transfers.append(Transfer(sent, size, max(ready[first:last]), start, free))
        first = last
    return transfers


def end_of_communication(groups: list[list[int]], gradients: list[Gradient], link: Link) -> float:
    """When the last group has been reduced [s]; 0 without gradients."""
    transfers = schedule(groups, gradients, link)
    return transfers[-1].end if transfers else 0.0


def limit(gradients: list[Gradient], link: Link) -> float:
    """No grouping ends the communication sooner [s]; 0 without gradients.

    What is ready at some moment or later takes at least one reduction of all of it from then on.
    """
    least, later = 0.0, 0
    for gradient in sorted(gradients, key=lambda gradient: -gradient.ready):
        later += gradient.bytes
        least = max(least, gradient.ready + link.alpha + link.beta * later)
    return least


def _by_scope(ordered: list[Gradient]) -> list[list[Gradient]]:
    scopes: dict[str, list[Gradient]] = {}
    for gradient in ordered:
        scopes.setdefault(gradient.scope, []).append(gradient)
    return sorted(scopes.values(), key=lambda run: run[-1].ready)


def _equal(ordered: list[Gradient], count: int) -> list[list[Gradient]]:
    """Deal runs by where the middle of each gradient lies in the sum of bytes."""
    total = sum(gradient.bytes for gradient in ordered)
    runs: list[list[Gradient]] = [[] for _ in range(count)]
    before = 0
    for gradient in ordered:
        middle = before + gradient.bytes / 2
        runs[min(int(count * middle / total), count - 1) if total else 0].append(gradient)
        before += gradient.bytes
    return [run for run in runs if run]


def _up_to(ordered: list[Gradient], size: float) -> list[list[Gradient]]:
    runs: list[list[Gradient]] = []
    filled = 0
    for gradient in ordered:
        if not runs or filled + gradient.bytes > size:
            runs.append([])
            filled = 0
        runs[-1].append(gradient)
        filled += gradient.bytes
    return runs


def _optimal(ordered: list[Gradient], link: Link) -> list[list[Gradient]]:
    """The grouping whose communication ends soonest; exact, in time linear in the gradients.

    Number the gradients 1..n in ready order, with ready times r and summed bytes S.

    *Runs in ready order suffice.* Take any grouping whose groups start at s_1 <= s_2 <= ... Move
    each gradient to the first group that starts when or after it is ready. Bytes only move to
    earlier groups and no group has to start later than its s_m, so for every m the work from s_m on
    has not grown. The end is the largest s_m plus work from s_m on: it has not grown either.

    *Dynamic programme.* The last group of the first j gradients starts at max(f, r_j), where f is
    the end of the groups before. That rises with f, so an earliest end is built from earliest ends:

        f(0) = 0,   f(j) = min over i < j of  max(f(i), r_j) + alpha + beta (S_j - S_i)

    *Two candidates suffice.* f(i+1) >= f(i) + beta (S_{i+1} - S_i): with a cut at k < i the right
    side bounds the same cut for i; with k = i it adds alpha besides. So f rises, and so does
    f(i) - beta S_i. Let p be the last i with f(i) <= r_j. Among i <= p the cost falls with i: take
    p. Among i > p it rises with i: take p + 1. As r_j rises, p only moves forward.

    Every beginning of the sequence, too, ends as early as it can: that leaves room for gradients
    that come later than foreseen.

    The problem is that of MG-WFBP (Shi, Chu, Li, INFOCOM 2019), solved here exactly.
    """
    count = len(ordered)
    sums, ends, cuts = [0], [0.0], [0]
    last_idle = 0
    for j in range(1, count + 1):
        gradient = ordered[j - 1]
        sums.append(sums[-1] + gradient.bytes)
        while last_idle + 1 < j and ends[last_idle + 1] <= gradient.ready:
            last_idle += 1
        end, cut = min(
            (max(ends[i], gradient.ready) + link.alpha + link.beta * (sums[j] - sums[i]), i)
            for i in range(last_idle, min(last_idle + 2, j))
        )
        ends.append(end)
        cuts.append(cut)
    runs = []
    stop = count
    while stop > 0:
        runs.append(ordered[cuts[stop] : stop])
        stop = cuts[stop]
    return runs[::-1]
