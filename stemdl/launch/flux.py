"""Flux. Sources: flux-batch(1), flux-run(1), flux-cancel(1), flux-hostlist(1) of flux-core.

The script is the first program of an instance of its own: flux commands in it speak to that
instance, and to the system's with --parent.
"""

from collections.abc import Sequence
from pathlib import Path

from stemdl.errors import UserError
from stemdl.launch.job import Job

JOB_ID = "$(flux getattr jobid)"
NODES = "flux hostlist --expand --delimiter='\\n' local"


def directives(job: Job) -> list[str]:
    site = job.site
    options = [f"--job-name={job.experiment.name}", f"--nodes={job.nodes} --exclusive"]
    options += [f"--time-limit={site.minutes}m"]
    options += [f"--bank={site.account}"] if site.account else []
    options += [f"--queue={site.queue}"] if site.queue else []
    options += [f"--output={job.logs}/{{{{id}}}}.log", *site.directives]
    return [f"# flux: {option}" for option in options]


def every_rank(job: Job) -> str:
    node = job.site.node
    gpus = ["--gpus-per-task=1"] if node.gpus else []
    return " ".join(
        (
            f"flux run --nodes={job.nodes} --ntasks={job.ranks}",
            f"--cores-per-task={job.cores_a_rank}",
            *gpus,
            "--setopt=exit-on-error",
            # The step's own limit ends with the job's; its ranks are warned before.
            f'--time-limit="$((limit - SECONDS))s" --signal=USR1@{job.site.notice}s',
            *job.site.step_options,
        )
    )


def every_node(job: Job) -> str:
    return f"flux run --nodes={job.nodes} --tasks-per-node=1 --setopt=pmi=off"


def signals() -> str:
    return ""


def submit(script: Path, after: str | None) -> list[str]:
    dependency = [] if after is None else [f"--dependency=afterany:{after}"]
    return ["flux", "batch", *dependency, str(script)]


def submitted(output: str) -> str:
    if not output.strip():
        raise UserError("flux batch: no job in its answer")
    return output.strip()


def cancel(jobs: Sequence[str]) -> list[str]:
    return ["flux", "--parent", "cancel", *jobs]


def exclude(job: str, nodes: Sequence[str]) -> None:
    """Flux changes a waiting job's duration, queue and name only (flux-update(1))."""
    return None
