"""LSF with jsrun, as on Summit. Sources: IBM Spectrum LSF 10.1 "bsub" and "bmod", IBM Job Step
Manager "jsrun" and "jskill", OLCF's Summit User Guide."""

import re
from collections.abc import Sequence
from pathlib import Path

from stemdl.errors import UserError
from stemdl.launch.job import Job, clock

JOB_ID = "$LSB_JOBID"
# The host file names each host once a core, and the launch node, where the script itself runs.
NODES = 'sort -u "$LSB_DJOB_HOSTFILE" | grep -v batch || true'


def directives(job: Job) -> list[str]:
    site = job.site
    options = [f"-J {job.experiment.name}", f"-nnodes {job.nodes}", f"-W {clock(site.minutes)}"]
    options += [f"-P {site.account}"] if site.account else []
    options += [f"-q {site.queue}"] if site.queue else []
    options += ["-wa USR1", f"-wt {-(-site.notice // 60)}"]  # whole minutes, rounded up
    options += [f"-o {job.logs}/%J.log", f"-e {job.logs}/%J.log", *site.directives]
    return [f"#BSUB {option}" for option in options]


def every_rank(job: Job) -> str:
    """One resource set a node holds all of its ranks, so that NCCL sees all of its GPUs."""
    node = job.site.node
    bind = "none" if node.binding else f"packed:{job.cores_a_rank}"
    return " ".join(
        (
            f"jsrun --nrs {job.nodes} --rs_per_host 1 --tasks_per_rs {node.ranks}",
            f"--cpu_per_rs {node.cores} --gpu_per_rs {node.gpus} --bind {bind}",
            "--launch_distribution packed --exit_on_error 1",
            *job.site.step_options,
        )
    )


def every_node(job: Job) -> str:
    return (
        f"jsrun --nrs {job.nodes} --rs_per_host 1 --tasks_per_rs 1 "
        f"--cpu_per_rs {job.site.node.cores} --gpu_per_rs {job.site.node.gpus} --bind none"
    )


def signals() -> str:
    return (
        "# LSF warns this script, which runs on a launch node; jskill reaches the ranks.\n"
        "trap 'warned=yes; jskill -s USR1 all' USR1"
    )


def submit(script: Path, after: str | None) -> list[str]:
    dependency = [] if after is None else ["-w", f"ended({after})"]
    return ["bsub", *dependency, str(script)]


def submitted(output: str) -> str:
    found = re.search(r"Job <(\d+)>", output)
    if found is None:
        raise UserError(f"bsub: no job number in its answer: {output.strip()!r}")
    return found[1]


def cancel(jobs: Sequence[str]) -> list[str]:
    return ["bkill", *jobs]


def exclude(job: str, nodes: Sequence[str]) -> list[str]:
    wanted = " && ".join(f"hname!='{node}'" for node in nodes)
    return ["bmod", "-R", f"select[{wanted}]", job]
