"""A job: one experiment on the nodes of one site, and the script that runs it.

The script is written by a template (job.sh.j2) that reads like the script. What differs between
schedulers stands in one module each (lsf, slurm, flux, local), with the functions of `Scheduler`.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import jinja2

import stemdl
from stemdl.errors import EXIT_INTERRUPTED
from stemdl.launch.sites import Site
from stemdl.schema import Experiment

TEMPLATE = Path(__file__).parent / "job.sh.j2"
SCRIPT, LOGS = "job.sh", "logs"  # in RUN


@dataclass(frozen=True)
class Job:
    """What to run, where. Paths are absolute; `chain` names the chain that the job belongs to."""

    experiment: Experiment
    arguments: tuple[str, ...]  # CONFIG and key=value, as for `stemdl train`
    site: Site
    scheduler: str
    nodes: int
    directory: Path  # relative paths of the experiment start here
    python: str
    chain: str
    written_by: str  # the command line, for the reader of the script
    node_logs: bool = False

    @property
    def run(self) -> Path:
        return self.directory / self.experiment.run

    @property
    def logs(self) -> Path:
        return self.run / LOGS

    @property
    def ranks(self) -> int:
        return self.nodes * self.site.node.ranks

    @property
    def cores_a_rank(self) -> int:
        return max(1, self.site.node.cores // self.site.node.ranks)


class Scheduler(Protocol):
    """What a scheduler's module holds. Commands are argument lists; text is shell."""

    JOB_ID: str  # this job's identity, within the job
    NODES: str  # command that prints the job's nodes, one a line

    def directives(self, job: Job) -> list[str]:
        """The script's first lines, which the scheduler reads."""

    def every_rank(self, job: Job) -> str:
        """Words before a command that start it on every rank."""

    def every_node(self, job: Job) -> str:
        """Words before a command that start it once on every node."""

    def signals(self) -> str:
        """Shell that passes the scheduler's warning on to the ranks; empty where it goes there."""


class Queue(Scheduler, Protocol):
    """A scheduler whose jobs wait for their turn."""

    def submit(self, script: Path, after: str | None) -> list[str]:
        """Submit `script`, to start when the job `after` has ended, however it ended."""

    def submitted(self, output: str) -> str:
        """The job's identity, from what the submission printed; UserError if it has none."""

    def cancel(self, jobs: Sequence[str]) -> list[str]:
        """Take waiting jobs out of the queue."""

    def exclude(self, job: str, nodes: Sequence[str]) -> list[str] | None:
        """Keep a waiting job away from `nodes`; None where the scheduler cannot."""


def script(job: Job, scheduler: Scheduler) -> str:
    """The job script, one readable file that passes shellcheck."""
    environment = jinja2.Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    template = environment.from_string(TEMPLATE.read_text())
    return template.render(
        job=job,
        site=job.site,
        node=job.site.node,
        scheduler=scheduler,
        numactl=any(each.cores or each.memory is not None for each in job.site.node.binding),
        version=stemdl.__version__,
        interrupted=EXIT_INTERRUPTED,
    )


def clock(minutes: int) -> str:
    """Minutes as hours and minutes: 90 -> '1:30'."""
    return f"{minutes // 60}:{minutes % 60:02d}"
