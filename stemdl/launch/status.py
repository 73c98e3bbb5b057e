"""stemdl status RUN: where a run stands, from its files alone; no scheduler is asked."""

import time
from pathlib import Path
from typing import Any

from stemdl import config
from stemdl.console import duration
from stemdl.errors import UserError
from stemdl.launch import chain, progress
from stemdl.schema import Experiment

QUIET = 600.0  # a run that has written nothing for this long has probably ended [s]


def status(run: Path, now: float | None = None) -> str:
    """A few lines for people. `now` is time.time() [s].

    Raises:
        UserError: `run` is no run directory, or its files are damaged.
    """
    now = time.time() if now is None else now
    if not (run / "config.yaml").exists():
        raise UserError(f"{run}: is no run (it has no config.yaml); wanted a directory of `train`")
    experiment = config.load(run / "config.yaml")
    lines, saved = progress.metrics(run), progress.last_checkpoint(run)
    train = [line for line in lines if line["kind"] == "train"]
    dev = [line for line in lines if line["kind"] == "dev"]
    jobs = chain.read(run)
    last: dict[str, Any] = max(lines, key=lambda line: line["step"], default={})
    step = max(last.get("step", 0), saved.step if saved else 0)
    epoch = max(last.get("epoch", 0.0), saved.epochs if saved else 0.0)
    epochs = experiment.train.epochs
    written = max((path.stat().st_mtime for path in _signs_of_life(run)), default=now)
    state = _state(epoch >= epochs and saved is not None, jobs, now - written)
    rows = [f"{run}: {state}: epoch {epoch:.2f} of {epochs}, step {step:,}"]
    if train:
        rows.append(_row("loss", f"{train[-1]['loss']:.4g} at step {train[-1]['step']:,}"))
    if dev:
        best = min(dev, key=lambda line: line["loss"])
        rows.append(
            _row(
                "dev",
                f"loss {dev[-1]['loss']:.4g}, Pearson {dev[-1]['pearson']:.4f} at epoch "
                f"{dev[-1]['epoch']:.2f}; best {best['loss']:.4g} at epoch {best['epoch']:.2f}",
            )
        )
    if train:
        rows.append(_row("speed", _speed(train[-1], epoch, epochs)))
    if saved is not None:
        rows.append(_row("time", split(saved.clock)))
        age = duration(now - saved.written)
        rows.append(_row("checkpoint", f"step {saved.step:,}, {age} ago, of {saved.ranks} ranks"))
    if jobs is not None:
        rows.append(_row("jobs", _jobs(jobs, now)))
    rows += _report(run, experiment)
    return "\n".join(rows)


def split(clock: dict[str, float]) -> str:
    """Where training time went, the largest part first."""
    whole = sum(clock.values()) or 1.0
    parts = sorted(clock.items(), key=lambda part: -part[1])
    shares = ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in parts if seconds > 0)
    return f"{duration(whole)}: {shares}"


def _state(done: bool, jobs: dict[str, Any] | None, silent: float) -> str:
    """One or two words; a chain knows best, then the age of the last sign of life."""
    if jobs is not None and jobs["state"] != "running":
        return jobs["state"]
    if done:
        return "trained"
    if jobs is not None and "code" in jobs["jobs"][-1]:
        return "between jobs"
    sign = f"last sign of life {duration(silent)} ago"
    return f"running, {sign}" if silent < QUIET else f"not running, {sign}"


def _speed(last: dict[str, Any], epoch: float, epochs: int) -> str:
    waits = ", ".join(
        f"{name} {last[f'{name}_s'] * 1e3:.3g} ms" for name in ("data", "compute", "reduction")
    )
    text = f"{last['samples_per_s']:.1f} samples/s; a step: {waits}"
    if last["epoch"] > 0 and epoch < epochs:
        step_seconds = sum(last[f"{name}_s"] for name in ("data", "compute", "reduction"))
        to_go = (epochs - epoch) * last["step"] / last["epoch"] * step_seconds
        text += f"; about {duration(to_go)} of training to go"
    return text


def _jobs(jobs: dict[str, Any], now: float) -> str:
    last = jobs["jobs"][-1]
    text = (
        f"{len(jobs['jobs'])} of this chain so far ({jobs['scheduler']}), the last is {last['job']}"
    )
    if jobs["state"] != "running":
        return f"{text}; {jobs['reason']}"
    if "code" in last:
        return f"{text}, ended with {last['code']}"
    left = last["ends"] - now
    return f"{text}: {duration(left)} left in the allocation" if left > 0 else f"{text}: over time"


def _report(run: Path, experiment: Experiment) -> list[str]:
    path = run / "report" / "report.html"
    return [_row("report", f"{path} ({experiment.evaluate.split} split)")] if path.exists() else []


def _signs_of_life(run: Path) -> list[Path]:
    names = ("metrics.jsonl", "checkpoints/last.h5", chain.CHAIN)
    return [path for path in (run / name for name in names) if path.exists()]


def _row(name: str, text: str) -> str:
    return f"  {name:<11}{text}"
