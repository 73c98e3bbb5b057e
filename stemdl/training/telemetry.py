"""What a run tells of itself: a clock, metrics.jsonl, TensorBoard and an MLPerf log.

Rank 0 writes; the other ranks hold silent recorders with the same methods.
"""

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from mlperf_logging.mllog.mllog import MLLogger

import stemdl
from stemdl import files

PHASES = ("compile", "data", "compute", "reduction", "evaluation", "checkpoint")


class Clock:
    """Seconds spent in each phase of a run; `totals` is saved and goes on after a restart."""

    def __init__(self, totals: dict[str, float] | None = None) -> None:
        self.totals = dict.fromkeys(PHASES, 0.0) | (totals or {})

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.totals[name] += time.perf_counter() - begun

    def move(self, seconds: float, source: str, target: str) -> None:
        """Count `seconds` of `source` as `target`: a part that is only known afterwards."""
        self.totals[source] -= seconds
        self.totals[target] += seconds

    def split(self) -> str:
        """One line: each phase in s and in % of all."""
        whole = sum(self.totals.values()) or 1.0
        return ", ".join(
            f"{name} {seconds:.1f} s ({seconds / whole:.0%})"
            for name, seconds in self.totals.items()
        )


class Recorder:
    """RUN/metrics.jsonl, RUN/tensorboard and RUN/mlperf.log, of rank 0 (`active`) alone."""

    def __init__(self, run: Path, *, active: bool, step: int) -> None:
        """Open the logs of `run`, first dropping lines after `step`: they will be written again."""
        self._lines = self._board = self._mlperf = None
        if not active:
            return
        path = run / "metrics.jsonl"
        if path.exists():
            kept = [line for line in path.read_text().splitlines() if _step(line) <= step]
            files.write_bytes(path, "".join(line + "\n" for line in kept).encode())
        self._lines = path.open("a", buffering=1)
        self._board = tf.summary.create_file_writer(str(run / "tensorboard"))
        self._mlperf = _mlperf_logger(run / "mlperf.log")

    def metrics(self, kind: str, step: int, **values: float) -> None:
        """One line of metrics.jsonl and a TensorBoard scalar for each value."""
        if self._lines is None or self._board is None:
            return
        self._lines.write(json.dumps({"kind": kind, "step": step} | values) + "\n")
        with self._board.as_default():
            for name, value in values.items():
                tf.summary.scalar(f"{kind}/{name}", value, step=step)

    def images(self, step: int, truth: np.ndarray, found: np.ndarray) -> None:
        """Truth and reconstruction side by side; both (B, H, W), on the truth's grey scale."""
        if self._board is None or not len(truth):
            return
        low, high = truth.min(), truth.max()
        pairs = np.concatenate([truth, found], axis=2)[..., None]
        grey = np.clip((pairs - low) / max(high - low, 1e-12), 0, 1)
        with self._board.as_default():
            tf.summary.image("truth | reconstruction", grey, step=step, max_outputs=len(grey))

    def event(self, key: str, value: Any = None, **metadata: Any) -> None:
        """An MLPerf point-in-time event, such as "global_batch_size"."""
        if self._mlperf is not None:
            self._mlperf.event(key=key, value=value, metadata=metadata or None)

    def start(self, key: str, **metadata: Any) -> None:
        """The start of an MLPerf interval, such as "epoch_start"."""
        if self._mlperf is not None:
            self._mlperf.start(key=key, metadata=metadata or None)

    def end(self, key: str, **metadata: Any) -> None:
        """The end of an MLPerf interval, such as "epoch_stop"."""
        if self._mlperf is not None:
            self._mlperf.end(key=key, metadata=metadata or None)

    def close(self) -> None:
        if self._lines is not None and self._board is not None:
            self._lines.close()
            self._board.close()


def _step(line: str) -> float:
    """The step of a line of metrics.jsonl; infinite for a line that a kill cut short."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _mlperf_logger(path: Path) -> MLLogger:
    """mlperf-logging's logger, writing to `path` alone and not to the console."""
    logger = logging.Logger(f"mlperf:{path}")
    logger.addHandler(logging.FileHandler(path))
    root = str(Path(stemdl.__file__).parent.parent)
    # The caller that an event names is the caller of Recorder, one frame further up.
    return MLLogger(logger, default_namespace="stemdl", default_stack_offset=2, root_dir=root)
