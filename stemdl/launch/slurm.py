"""Slurm. Sources: sbatch(1), srun(1), sbcast(1), scontrol(1) of Slurm 22.05 and later."""

from collections.abc import Sequence
from pathlib import Path

from stemdl.errors import UserError
from stemdl.launch.job import Job

JOB_ID = "$SLURM_JOB_ID"
NODES = 'scontrol show hostnames "$SLURM_JOB_NODELIST"'


def directives(job: Job) -> list[str]:
    site, node = job.site, job.site.node
    options = [f"--job-name={job.experiment.name}", f"--nodes={job.nodes}"]
    options += [f"--ntasks-per-node={node.ranks}", f"--cpus-per-task={job.cores_a_rank}"]
    options += [f"--gpus-per-node={node.gpus}"] if node.gpus else []
    options += [f"--time={site.minutes}"]
    options += [f"--account={site.account}"] if site.account else []
    options += [f"--partition={site.queue}"] if site.queue else []
    # Without "B:" the signal goes to the ranks and not to this script. After a node has failed,
    # Slurm starts the job again on others: the failed one is down.
    options += [f"--signal=USR1@{site.notice}", "--requeue", "--open-mode=append"]
    options += [f"--output={job.logs}/%j.log", *site.directives]
    return [f"#SBATCH {option}" for option in options]


def every_rank(job: Job) -> str:
    node = job.site.node
    gpus = ["--gpus-per-task=1"] if node.gpus else []
    return " ".join(
        (
            f"srun --nodes={job.nodes} --ntasks={job.ranks} --ntasks-per-node={node.ranks}",
            f"--cpus-per-task={job.cores_a_rank}",
            *gpus,
            "--kill-on-bad-exit=1",
            *job.site.step_options,
        )
    )


def every_node(job: Job) -> str:
    return f"srun --nodes={job.nodes} --ntasks={job.nodes} --ntasks-per-node=1 --mpi=none"


def signals() -> str:
    return ""


def submit(script: Path, after: str | None) -> list[str]:
    dependency = [] if after is None else [f"--dependency=afterany:{after}"]
    return ["sbatch", "--parsable", *dependency, str(script)]


def submitted(output: str) -> str:
    """--parsable prints "job" or "job;cluster"."""
    number = output.strip().split(";")[0]
    if not number.isdigit():
        raise UserError(f"sbatch: no job number in its answer: {output.strip()!r}")
    return number


def cancel(jobs: Sequence[str]) -> list[str]:
    return ["scancel", *jobs]


def exclude(job: str, nodes: Sequence[str]) -> list[str]:
    return ["scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(nodes)}"]
