"""A machine as data: its rates, and where each number comes from.

    summit = load("configs/machines/summit.yaml")
    seconds = allreduce(summit, ranks=27_600, size=4.4e8, across="tree")

Every quantity in the file is `{value, kind, source}`. The kinds: `sourced` (a published figure),
`measured` (by us, the command is the source), `fitted` (to a published result, the source says
which) and `assumed` (a guess; the study shows how much depends on it).
"""

import dataclasses
import math
from pathlib import Path
from typing import Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from stemdl.errors import UserError

Kind = Literal["sourced", "measured", "fitted", "assumed"]
Across = Literal["ring", "tree"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Quantity(_Strict):
    """A number with its origin."""

    value: NonNegativeFloat
    kind: Kind
    source: str = Field(min_length=10)


class Published(_Strict):
    """A result that others measured on this machine: an efficiency, or a ratio of two speeds."""

    experiment: str  # the name of the experiment that it is about
    ranks: PositiveInt
    strategy: str
    value: PositiveFloat  # efficiency against one rank, or how much quicker than `over`
    over: str | None = None  # another strategy
    fits: str | None = None  # the quantity that was fitted to it; None: held out
    source: str = Field(min_length=10)


class Description(_Strict):
    """A machine file. `rates` has the quantities that `Machine` lists."""

    name: str
    nodes: PositiveInt
    ranks_per_node: PositiveInt
    rates: dict[str, Quantity]
    published: tuple[Published, ...] = ()


@dataclasses.dataclass(frozen=True)
class Machine:
    """The numbers of a machine file. Rates are for one direction; a rank drives one device."""

    nodes: int
    ranks_per_node: int
    sustained_flops: float  # of this project's training, one rank alone [FLOP/s]
    peak_flops: float  # of the matrix units, one rank [FLOP/s]
    memory_bandwidth: float  # of one rank's device [B/s]
    launch: float  # start of one operation on the device [s]
    link_bandwidth: float  # from one rank to the next in a node [B/s]
    link_latency: float  # of one step of a collective in a node [s]
    node_bandwidth: float  # from a node into the network [B/s]
    network_latency: float  # of one step of a collective between nodes [s]
    network_use: float  # part of the bandwidth that collectives reach
    message: float  # rank 0's work on one rank's request for one tensor [s]
    speed_spread: float  # standard deviation of ranks' speeds, as a part of the mean
    step_spread: float  # the same of one rank's successive steps
    local_read: float  # from a node's own disk [B/s]
    global_read: float  # from the global file system, all nodes together [B/s]
    global_use: float  # part of it that training's reads reach


QUANTITIES = tuple(
    field.name
    for field in dataclasses.fields(Machine)
    if field.name not in ("nodes", "ranks_per_node")
)


def load(path: str | Path) -> tuple[Machine, Description]:
    """Read a machine file.

    Raises:
        UserError: it cannot be read, or a quantity is missing, unknown or has no source.
    """
    try:
        tree = yaml.safe_load(Path(path).read_text())
        description = Description.model_validate(tree)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path}: is not YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UserError(f"{path}: {where}: {first['msg']}, found {first['input']!r}") from error
    missing = [name for name in QUANTITIES if name not in description.rates]
    unknown = [name for name in description.rates if name not in QUANTITIES]
    if missing or unknown:
        found = ", ".join(
            [f"no {name}" for name in missing] + [f"unknown {name}" for name in unknown]
        )
        raise UserError(f"{path}: rates: found {found}; wanted {', '.join(QUANTITIES)}")
    values = {name: quantity.value for name, quantity in description.rates.items()}
    return Machine(description.nodes, description.ranks_per_node, **values), description


def steps_of(across: Across, members: int) -> int:
    """Latencies that an allreduce of `members` meets one after another."""
    if members == 1:
        return 0
    return 2 * (members - 1) if across == "ring" else 2 * math.ceil(math.log2(members))


def allreduce(
    machine: Machine, ranks: int, size: float, *, across: Across = "tree", hierarchical: bool = True
) -> float:
    """Time to sum `size` bytes a rank over all ranks [s]; the ranks fill nodes one by one.

    Hierarchical: reduce-scatter on the ring of a node's ranks, allreduce across nodes (each rank
    its part, all parts through the node's port), allgather on the ring. Flat: one ring of all
    ranks, or one tree, that passes each port once each way.

    Source: alpha-beta costs of Thakur, Rabenseifner, Gropp (2005), doi:10.1177/1094342005051521; a
    double binary tree (Sanders, Speck, Träff 2009, doi:10.1016/j.parco.2009.09.001) takes the
    bandwidth of a ring with logarithmic latency.
    """
    if ranks == 1:
        return 0.0
    local = min(ranks, machine.ranks_per_node)
    nodes = math.ceil(ranks / machine.ranks_per_node)
    port = machine.node_bandwidth * machine.network_use
    if not hierarchical:
        narrowest = machine.link_bandwidth if nodes == 1 else min(machine.link_bandwidth, port)
        latency = machine.link_latency if nodes == 1 else machine.network_latency
        return steps_of(across, ranks) * latency + 2 * (ranks - 1) / ranks * size / narrowest
    time = 0.0
    if local > 1:
        part = (local - 1) / local * size / machine.link_bandwidth
        time += 2 * ((local - 1) * machine.link_latency + part)
    if nodes > 1:
        time += steps_of(across, nodes) * machine.network_latency
        time += 2 * (nodes - 1) / nodes * size / port
    return time
