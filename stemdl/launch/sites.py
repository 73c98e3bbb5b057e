"""The site file: everything that a job script needs to know of a machine and that no experiment
should hold: scheduler, project, modules, cores, GPUs, node-local disks, binding of ranks.

    site = sites.load("configs/sites/summit.yaml", ["account=abc123"])
"""

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from stemdl import config
from stemdl.schema import Section


class Environment(Section):
    """What a job loads before Python starts."""

    modules: tuple[str, ...] = Field((), description="modules to load")
    variables: dict[str, str] = Field({}, description="environment variables, in double quotes")
    python: str | None = Field(
        None, description="the virtual environment's Python; null: the one that runs stemdl launch"
    )
    archive: str | None = Field(
        None,
        description="tar of the virtual environment, unpacked to node.local_dir on every node, so "
        "that ranks do not import from the shared file system; null: no",
    )


class Binding(Section):
    """Where one local rank runs and which network port it uses."""

    cores: str | None = Field(None, description="hardware threads, for numactl --physcpubind")
    memory: NonNegativeInt | None = Field(None, description="NUMA node, for numactl --membind")
    variables: dict[str, str] = Field({}, description="such as this rank's InfiniBand port")


class Node(Section):
    """A compute node as a job uses it."""

    ranks: PositiveInt = Field(1, description="ranks a node")
    cores: PositiveInt = Field(1, description="cores that a job may use on a node")
    gpus: NonNegativeInt = Field(0, description="GPUs of a node")
    local_dir: str | None = Field(None, description="node-local disk, such as /mnt/bb/$USER")
    binding: tuple[Binding, ...] = Field(
        (), description="one entry for each local rank; empty: the launcher binds"
    )
    health: str = Field(
        "true", description="shell command that succeeds on a node that can be used"
    )

    @model_validator(mode="after")
    def _one_binding_a_rank(self) -> "Node":
        if self.binding and len(self.binding) != self.ranks:
            raise ValueError(
                f"node.binding has {len(self.binding)} entries, wanted one for each of the "
                f"{self.ranks} ranks of a node"
            )
        return self


class Site(Section):
    """A machine and this project on it."""

    name: str = Field(description="the machine")
    scheduler: Literal["lsf", "slurm", "flux", "local"] = Field(description="what runs its jobs")
    account: str | None = Field(None, description="project that is charged")
    queue: str | None = Field(None, description="queue or partition")
    minutes: PositiveInt = Field(60, description="wall-time limit of a job [min]")
    notice: PositiveInt = Field(
        300, description="time before the limit at which training checkpoints and leaves [s]"
    )
    directives: tuple[str, ...] = Field((), description="more options of the job, as typed")
    step_options: tuple[str, ...] = Field((), description="more options of the ranks' launcher")
    environment: Environment = Environment()
    node: Node = Node()
    mirror: PositiveInt | None = Field(
        None,
        description="train with RUN on the first node's local disk and copy it back this often "
        "[s]; null: write to RUN itself",
    )

    @model_validator(mode="after")
    def _consistent(self) -> "Site":
        if self.node.local_dir is None and (self.mirror or self.environment.archive):
            raise ValueError("mirror and environment.archive need node.local_dir")
        if self.notice >= 60 * self.minutes:
            raise ValueError(
                f"notice is {self.notice} s, wanted less than the job's {self.minutes} min"
            )
        return self


def load(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Site:
    """Read a site file and apply `key=value` overrides.

    Raises:
        UserError: missing file, bad YAML, unknown key or value out of range.
    """
    return config.check(Site, config.read(path, overrides), str(path))
