"""stemdl launch: write the job script of an experiment, and submit it as a chain of jobs."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from stemdl import config, files
from stemdl.console import say
from stemdl.errors import EXIT_INTERRUPTED, UserError
from stemdl.launch import chain, job, schedulers, sites
from stemdl.launch.job import Job, Queue


def launch(
    arguments: Sequence[str],
    site: sites.Site,
    *,
    on: str,
    nodes: int,
    jobs: int,
    submit: bool,
    dry_run: bool,
    node_logs: bool,
    written_by: Sequence[str],
) -> int:
    """Write RUN/job.sh and, if `submit`, put `jobs` of it into the queue; return the exit code.

    Args:
        arguments: CONFIG and its key=value overrides.
        on: the scheduler; it must be the site's, or local.
        jobs: length of the chain; jobs that are not needed are taken back.
        dry_run: print the script and write nothing.
        written_by: the command line, named in the script.

    Raises:
        UserError: mistakes in the experiment, the site or the options; a scheduler that refuses.
    """
    experiment = config.load(arguments[0], list(arguments[1:]))
    if on not in (site.scheduler, "local"):
        raise UserError(f"--on is {on}, but {site.name} is a site of {site.scheduler}")
    if jobs < 1 or nodes < 1:
        raise UserError(f"--nodes is {nodes} and --chain {jobs}, wanted 1 or more")
    _check_place(experiment.run, site)
    work = Job(
        experiment=experiment,
        arguments=(str(Path(arguments[0]).absolute()), *arguments[1:]),
        site=site,
        scheduler=on,
        nodes=nodes,
        directory=Path.cwd(),
        python=site.environment.python or sys.executable,
        chain=time.strftime("%Y%m%d-%H%M%S"),
        written_by=shlex.join(written_by),
        node_logs=node_logs,
    )
    text = job.script(work, schedulers.ALL[on])
    if dry_run:
        print(text, end="")
        return 0
    if submit and (other := chain.at_work(work.run)):
        raise UserError(
            f"{work.run}: job {other} works on it; wait for its end, or cancel it and delete "
            f"{work.run / chain.CHAIN}"
        )
    path = work.run / job.SCRIPT
    work.logs.mkdir(parents=True, exist_ok=True)  # schedulers do not make it for their output
    files.write_bytes(path, text.encode())
    path.chmod(0o755)
    say(f"launch: wrote {path}: {nodes} x {site.node.ranks} ranks, {site.minutes} min")
    queue = schedulers.QUEUES.get(on)
    if not submit:
        order = queue.submit(path, None) if queue else ["bash", str(path)]
        say(f"launch: submit it with: {shlex.join(order)}")
        return 0
    return _queue(work, queue, jobs) if queue else _here(work, jobs)


def _check_place(run: Path, site: sites.Site) -> None:
    """RUN must outlive the job."""
    local = site.node.local_dir
    if local and run.absolute().is_relative_to(os.path.expandvars(local)):
        raise UserError(
            f"run is {run}, on the nodes' own disks ({local}), and would be lost with the job: set "
            "run to a shared directory; the site file's mirror keeps it on the node meanwhile"
        )


def _queue(work: Job, scheduler: Queue, jobs: int) -> int:
    """Submit the chain; RUN/queue.json names its jobs, also when the scheduler refuses some."""
    submitted: list[str] = []
    for _ in range(jobs):
        order = scheduler.submit(work.run / job.SCRIPT, submitted[-1] if submitted else None)
        try:
            done = subprocess.run(order, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            raise UserError(f"{order[0]}: not found; submit on a login node of the site") from error
        if done.returncode != 0:
            reason = (done.stderr or done.stdout).strip()
            raise UserError(
                f"{shlex.join(order)}: refused: {reason} ({len(submitted)} of {jobs} jobs wait)"
            )
        submitted.append(scheduler.submitted(done.stdout))
        queue = {"chain": work.chain, "jobs": submitted}
        files.write_json(work.run / chain.QUEUE, chain.QUEUE_SCHEMA, queue)
    say(f"launch: submitted {', '.join(submitted)}; watch it with: stemdl status {work.run}")
    return 0


def _here(work: Job, jobs: int) -> int:
    """Run the chain on this machine, one job after the other."""
    code = EXIT_INTERRUPTED
    for _ in range(jobs):
        code = subprocess.run(["bash", str(work.run / job.SCRIPT)], check=False).returncode
        record = chain.read(work.run)
        if record is None or record["state"] != "running":
            break
    return code
