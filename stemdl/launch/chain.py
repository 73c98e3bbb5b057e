"""A chain of jobs that go on from each other's checkpoint until the run is done.

All jobs are in the queue from the start, each to begin when the one before has ended, however it
ended. So nothing has to be submitted from a compute node, and a job whose node died does not break
the chain, as it would if each job had to submit the next. The price is that jobs may be left over:
the job that finishes the run takes them out of the queue, and one that starts all the same ends at
once.

A chain goes on as long as its jobs gain ground, and stops when the run is done, when the experiment
holds a mistake (exit code 2), or when two jobs in a row leave the checkpoint where it was. RUN/
queue.json (jobs submitted) is written by `stemdl launch`, RUN/chain.json by the jobs, as here:

    python -m stemdl.launch.chain begin RUN --chain C --job J --seconds S --scheduler slurm
    python -m stemdl.launch.chain end RUN --chain C --job J --code N --nodes A B --well A
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stemdl import command, files
from stemdl.console import say
from stemdl.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR
from stemdl.launch import progress, schedulers

CHAIN, CHAIN_SCHEMA = "chain.json", "stemdl.chain/1"
QUEUE, QUEUE_SCHEMA = "queue.json", "stemdl.queue/1"
EXIT_NOTHING_LEFT = 3
PATIENCE = 2  # jobs in a row that may leave the checkpoint where it was


def read(run: Path) -> dict[str, Any] | None:
    """RUN/chain.json, or None: `state` is running, finished or stopped (with a `reason`)."""
    path = run / CHAIN
    return files.read_json(path, CHAIN_SCHEMA) if path.exists() else None


def begin(run: Path, chain: str, job: str, *, seconds: float, scheduler: str) -> int:
    """Note that a job has begun; the exit code says if there is anything to do (0) or not (3)."""
    record = read(run)
    if record is not None and record["chain"] != chain and (other := at_work(run)):
        say(f"chain: nothing to do: job {other} of another chain works on {run}")
        return EXIT_NOTHING_LEFT
    if record is None or record["chain"] != chain:
        record = {"chain": chain, "scheduler": scheduler, "state": "running", "jobs": []}
    _settle(run, record)
    if record["state"] != "running":
        say(f"chain: nothing left to do: {record['reason']}")
        _write(run, record)
        return EXIT_NOTHING_LEFT
    now = time.time()
    begun = {"job": job, "begun": now, "ends": now + seconds, "epochs_before": _epochs(run)}
    record["jobs"].append(begun)
    _write(run, record)
    return 0


def end(run: Path, chain: str, job: str, *, code: int, bad: Sequence[str]) -> None:
    """Note how a job ended; take back the rest of the chain, or keep it away from `bad` nodes."""
    record = read(run)
    if record is None or record["chain"] != chain:
        return
    last = record["jobs"][-1]
    last |= {"ended": time.time(), "code": code, "epochs_after": _epochs(run), "bad": list(bad)}
    _settle(run, record)
    _write(run, record)
    waiting = _waiting(run, chain, job)
    if record["state"] != "running":
        say(f"chain: {record['state']}: {record['reason']}")
        if waiting:
            say(f"chain: taking {len(waiting)} waiting jobs out of the queue")
            _ask(schedulers.QUEUES[record["scheduler"]].cancel(waiting))
        return
    then = f"job {waiting[0]} goes on" if waiting else "no further job waits; launch again to go on"
    say(f"chain: job {job} ended with {code} at epoch {last['epochs_after']:.2f}; {then}")
    for each in waiting if bad else ():
        order = schedulers.QUEUES[record["scheduler"]].exclude(each, bad)
        if order is None:
            say(f"chain: {', '.join(bad)} did not answer; this scheduler cannot avoid them")
            break
        _ask(order)
        say(f"chain: job {each} avoids {', '.join(bad)}, which did not answer")


def at_work(run: Path) -> str | None:
    """The job that works on `run` now, as far as its files tell; None if there is none."""
    record = read(run)
    if record is None or not record["jobs"] or "code" in record["jobs"][-1]:
        return None
    last = record["jobs"][-1]
    return last["job"] if last["ends"] > time.time() else None


def _settle(run: Path, record: dict[str, Any]) -> None:
    """Draw the conclusion from the jobs so far: `state` and `reason`."""
    jobs = record["jobs"]
    if not jobs or record["state"] != "running":
        return
    last = jobs[-1]
    if "code" not in last:  # killed before it could tell: by the limit, or with its node
        last |= {"code": None, "epochs_after": _epochs(run)}
    barren = 0
    for job in reversed(jobs):
        if job["code"] == 0 or job["epochs_after"] > job["epochs_before"]:
            break
        barren += 1
    if last["code"] == 0:
        record |= {"state": "finished", "reason": "the run is done and evaluated"}
    elif last["code"] == EXIT_USER_ERROR:
        reason = f"job {last['job']} found a mistake in the experiment; its log says which"
        record |= {"state": "stopped", "reason": reason}
    elif barren >= PATIENCE:
        reason = (
            f"{barren} jobs in a row ended where they began (epoch {last['epochs_after']:.2f}); "
            f"see the log of job {last['job']}"
        )
        record |= {"state": "stopped", "reason": reason}


def _epochs(run: Path) -> float:
    """Epochs in the last checkpoint; 0 without one."""
    found = progress.last_checkpoint(run)
    return 0.0 if found is None else found.epochs


def _waiting(run: Path, chain: str, job: str) -> list[str]:
    """Jobs of this chain that come after `job` in the queue."""
    path = run / QUEUE
    if not path.exists():
        return []
    queue = files.read_json(path, QUEUE_SCHEMA)
    jobs: list[str] = queue["jobs"] if queue["chain"] == chain else []
    return jobs[jobs.index(job) + 1 :] if job in jobs else []


def _ask(order: Sequence[str]) -> None:
    """Give an order to the scheduler; a refusal is told and no more: the chain works without."""
    done = subprocess.run(order, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        say(f"chain: {' '.join(order)}: {(done.stderr or done.stdout).strip()}")


def _write(run: Path, record: dict[str, Any]) -> None:
    plain = {key: value for key, value in record.items() if key not in ("schema", "stemdl_version")}
    files.write_json(run / CHAIN, CHAIN_SCHEMA, plain)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="stemdl.launch.chain", description=__doc__)
    parser.add_argument("what", choices=("begin", "end"))
    parser.add_argument("run", type=Path)
    parser.add_argument("--chain", required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--scheduler", choices=tuple(schedulers.ALL))
    parser.add_argument("--code", type=int, default=EXIT_INTERRUPTED)
    parser.add_argument("--nodes", default="", help="the job's nodes, divided by white space")
    parser.add_argument("--well", default="", help="those that answered")
    parsed = parser.parse_args(arguments)
    if parsed.what == "begin":
        return begin(
            parsed.run,
            parsed.chain,
            parsed.job,
            seconds=parsed.seconds,
            scheduler=parsed.scheduler,
        )
    bad = unwell(parsed.nodes.split(), parsed.well.split())
    end(parsed.run, parsed.chain, parsed.job, code=parsed.code, bad=bad)
    return 0


def unwell(nodes: Sequence[str], well: Sequence[str]) -> list[str]:
    """The nodes that did not answer, if the others did; names may be long or short.

    When nobody answered it was the question that failed, and no node is blamed.
    """
    answered = {name.split(".")[0] for name in well}
    silent = [name for name in nodes if name.split(".")[0] not in answered]
    return silent if len(silent) < len(nodes) else []


if __name__ == "__main__":
    sys.exit(command.run(main))
