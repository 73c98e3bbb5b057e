"""The one training loop.

    stemdl train configs/demo.yaml                       # one rank
    mpirun -n 2 stemdl train configs/demo.yaml           # two

What a run is at any moment is its checkpoint: weights, optimizer, loss scaler, averaged weights and
position. Everything else (order of data, augmentation, dropout, schedules) is a function of the
seed and the position, so that a run that was cut ends where the unbroken one would.
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import tensorflow as tf

from stemdl import config, files, logs
from stemdl.console import progress, say
from stemdl.data import staging
from stemdl.data.pipeline import Batch
from stemdl.errors import EXIT_USER_ERROR, UserError
from stemdl.network import flops
from stemdl.ranks import Ranks, stop_all
from stemdl.reduction import levers, plan
from stemdl.reduction.horovod_timeline import Profile
from stemdl.schema import Experiment
from stemdl.training import devices
from stemdl.training.feed import Feed, open_feed
from stemdl.training.interruption import Interruption, Watchdog
from stemdl.training.state import SUMS, State
from stemdl.training.step import training_step, validation_step
from stemdl.training.stragglers import Efforts
from stemdl.training.telemetry import Clock, Recorder


@dataclass(frozen=True)
class Outcome:
    """How a call of `train` ended. `stopped`: why it left early, or None when the run is done."""

    step: int
    stopped: str | None


def train(experiment: Experiment, ranks: Ranks, *, started: float | None = None) -> Outcome:
    """Train until `train.epochs` are done, a signal arrives or the wall-clock budget is spent.

    Args:
        experiment: the experiment; RUN is `experiment.run`.
        ranks: the processes that train together; all of them call this.
        started: time.time() at the start of the process, for `train.wall_limit` [s].

    Raises:
        UserError: on all ranks alike, for whatever the user can mend.
        Interrupted: on all ranks, when a signal comes while the data are being staged.
    """
    settings = experiment.train
    interruption = Interruption(
        ranks, started=started or time.time(), wall_limit=settings.wall_limit
    )
    watchdog = Watchdog(settings.stall_limit, ranks)
    with watchdog.watching(), interruption.listening(), logs.listening(ranks) as warnings:
        # 1. Devices and Horovod, before anything else touches TensorFlow.
        with ranks.together("starting Horovod"):
            devices.set_up(settings, experiment.seed, ranks)
            levers.start(experiment.reduction, ranks, profile=settings.profile_steps > 0)
        # 2. Data: staged if wanted, however long that takes, opened and agreed on.
        watchdog.beat("staging the data", patient=True)
        with staging.staged(experiment, ranks) as directory:
            watchdog.beat("opening the data")
            measuring = partial(watchdog.beat, "measuring statistics of the data")
            feed = open_feed(experiment, ranks, directory, measuring)
            # 3. Network, optimizer, loss scaler, steps; 4. the last checkpoint, if there is one.
            watchdog.beat("building the network")
            outcome = Trainer(experiment, ranks, feed, interruption, watchdog, warnings).run()
        # 5. Room for the next job, if the run is done.
        stage = experiment.stage
        if stage.dir is not None and stage.purge and outcome.stopped is None:
            staging.purge(experiment, ranks)
        return outcome


class Trainer:
    """The state of a run and its loop."""

    def __init__(
        self,
        experiment: Experiment,
        ranks: Ranks,
        feed: Feed,
        interruption: Interruption,
        watchdog: Watchdog,
        warnings: logs.Warnings,
    ) -> None:
        self.experiment, self.ranks, self.feed = experiment, ranks, feed
        self.interruption, self.watchdog, self.warnings = interruption, watchdog, warnings
        self.state = State(experiment, feed.shapes, feed.steps_per_epoch, ranks)
        self.total_steps = feed.steps_per_epoch * experiment.train.epochs
        groups = plan.groups(self.state.model, feed.shapes, experiment, ranks)
        self.step = training_step(self.state, groups, experiment, ranks)
        self.validation = validation_step(self.state.model, experiment)
        source = self.state.resume()
        self.position = self.state.position
        if source is not None:
            self._say(f"resuming at step {self.position.step:,} from {source}")
        self.clock = Clock(self.position.clock)
        self.efforts = Efforts(self.clock.totals)
        with ranks.together("opening the logs"):
            if ranks.rank == 0:
                resolved = config.dump(experiment).encode()
                files.write_bytes(experiment.run / "config.yaml", resolved)
            self.recorder = Recorder(
                experiment.run, active=ranks.rank == 0, step=self.position.step
            )
        self.profile = Profile(experiment, ranks)
        self._announce(len(groups))

    def run(self) -> Outcome:
        """Epochs from the position to the end, or to an interruption."""
        settings, position = self.experiment.train, self.position
        self.saved_at, self.save_seconds = time.time(), 0.0
        self.log_mark = self._mark()
        self.compiled = False
        stopped: str | None = None
        self.recorder.start("run_start")
        batches = iter(self.feed.training(range(position.step, self.total_steps)))
        while position.epoch < settings.epochs and stopped is None:
            number = position.epoch
            self.recorder.start("epoch_start", epoch_num=number)
            stopped = self._epoch(batches)
            self.recorder.end("epoch_stop", epoch_num=number)
        if position.epoch == settings.epochs:
            stopped = None  # a signal after the last step interrupts nothing
        if stopped is None and position.step % settings.log_every:
            self._log()
        self._save()
        self._report_profile()
        self.recorder.end("run_stop", status="aborted" if stopped else "success")
        self.recorder.close()
        self._conclude(stopped)
        return Outcome(position.step, stopped)

    def _epoch(self, batches: Iterator[Batch]) -> str | None:
        """Train to the end of the epoch; why to stop, or None."""
        position, steps = self.position, self.feed.steps_per_epoch
        what = f"epoch {position.epoch + 1}/{self.experiment.train.epochs}"
        remaining = range(position.step_in_epoch, steps)
        for _ in progress(remaining, what, unit="step", rank=self.ranks.rank):
            with self.clock.phase("data"):
                batch = self._next(batches)
            self._step(batch)
            self.profile.after_step()
            position.step += 1
            position.step_in_epoch += 1
            self.watchdog.beat(f"step {position.step + 1}")
            if position.step_in_epoch == steps:
                position.epoch, position.step_in_epoch = position.epoch + 1, 0
            stopped = self._between_steps()
            if stopped is not None:
                return stopped
        return None

    def _next(self, batches: Iterator[Batch]) -> Batch:
        """The next batch; if it cannot be read every rank ends, for none can go on without it."""
        try:
            return next(batches)
        except UserError as error:
            if self.ranks.size == 1:
                raise
            print(f"stemdl: rank {self.ranks.rank}: {error}", file=sys.stderr, flush=True)
            stop_all(self.ranks, EXIT_USER_ERROR)
            raise

    def _step(self, batch: Batch) -> None:
        number = tf.constant(self.position.step, tf.int64)
        if self.compiled:
            with self.clock.phase("compute"):
                self.step(batch, number)
            return
        with self.clock.phase("compile"):  # the first step traces and compiles the graph
            self.step(batch, number)
            # Waiting for ranks that still compile is no cost of the reduction.
            sums = self.state.sums.numpy()
            sums[SUMS.index("reduction_s")] = 0.0
            self.state.sums.assign(sums)
        self.compiled = True

    def _between_steps(self) -> str | None:
        """Log, validate and checkpoint where they are due; why to stop, or None."""
        settings, step = self.experiment.train, self.position.step
        if step % settings.log_every == 0:
            self._log()
        validate_every = max(1, round(settings.validate_every * self.feed.steps_per_epoch))
        if step % validate_every == 0 or step == self.total_steps:
            self._validate()
        if not self.interruption.due(step):
            return None
        stopped, now = self.interruption.agree(step, reserve=2 * self.save_seconds)
        if stopped is None and now - self.saved_at >= settings.checkpoint_every:
            self._save()
            self.saved_at = now
        return stopped

    def _validate(self) -> None:
        """Score the dev split on all ranks; keep the best weights; show pictures."""
        position, images = self.position, self.experiment.train.images
        self.recorder.start("eval_start", epoch_num=position.epoch)
        sums = np.zeros(3)
        shown: list[tuple[np.ndarray, np.ndarray]] = []
        with self.clock.phase("evaluation"), self.state.averaged_weights():
            for batch in self.feed.validation:
                self.watchdog.beat("validation")
                part, found = self.validation(batch)
                sums += part.numpy()
                if sum(len(truth) for truth, _ in shown) < images:
                    shown.append((batch["potential"].numpy(), found.numpy()))
            count, loss, correlation = sum(self.ranks.collect(sums))
        loss, correlation = float(loss / count), float(correlation / count)
        epoch = position.step / self.feed.steps_per_epoch
        self.recorder.metrics("dev", position.step, epoch=epoch, loss=loss, pearson=correlation)
        self.recorder.event("eval_accuracy", correlation, epoch_num=position.epoch)
        self.recorder.end("eval_stop", epoch_num=position.epoch)
        if shown:
            truth, found = (np.concatenate(part) for part in zip(*shown, strict=True))
            self.recorder.images(position.step, truth[:images], found[:images])
        self._say(f"epoch {epoch:.2f}: dev loss {loss:.4f}, Pearson {correlation:.4f}")
        if np.isfinite(loss) and (position.best is None or loss < position.best):
            position.best = loss
            self._save(best=True)

    def _log(self) -> None:
        """One line of metrics over the steps since the last one, averaged over ranks."""
        own = self.state.sums.numpy()
        self.efforts.count(own[SUMS.index("steps")], own[SUMS.index("reduction_s")])
        sums = np.mean(self.ranks.collect(own), axis=0)
        self.state.sums.assign(tf.zeros_like(self.state.sums))
        totals = dict(zip(SUMS, sums.tolist(), strict=True))
        steps, step = totals["steps"], self.position.step
        self.clock.move(totals["reduction_s"], "compute", "reduction")
        before, self.log_mark = self.log_mark, self._mark()
        spent = {name: seconds - before[name] for name, seconds in self.log_mark.items()}
        training = spent["wall"] - spent["evaluation"] - spent["checkpoint"] - spent["compile"]
        samples = steps * self.experiment.train.batch * self.ranks.size
        last = tf.constant(step - 1, tf.int64)
        self.recorder.metrics(
            "train",
            step,
            epoch=step / self.feed.steps_per_epoch,
            loss=totals["loss"] / steps,
            gradient_norm=totals["gradient_norm"] / max(1.0, steps - totals["skipped"]),
            skipped=totals["skipped"],
            lr=float(self.state.optimizer.learning_rate(last)),
            loss_scale=float(self.state.scaler.scale),
            samples_per_s=samples / max(training, 1e-9),
            **{f"{name}_s": spent[name] / steps for name in ("data", "compute", "reduction")},
        )
        self.warnings.tell()

    def _mark(self) -> dict[str, float]:
        return self.clock.totals | {"wall": time.perf_counter()}

    def _save(self, *, best: bool = False) -> None:
        begun = time.perf_counter()
        self.watchdog.beat("a checkpoint")
        with self.clock.phase("checkpoint"):
            self.state.save(dict(self.clock.totals), best=best)
        self.save_seconds = time.perf_counter() - begun

    def _announce(self, groups: int) -> None:
        """What is about to run, for people and for the MLPerf log."""
        settings, size, feed = self.experiment.train, self.ranks.size, self.feed
        weights = sum(int(np.prod(each.shape)) for each in self.state.model.trainable_variables)
        self._say(
            f"{size} rank{'s' if size > 1 else ''}, batch {settings.batch} a rank, "
            f"{feed.train.count:,} training and {feed.dev.count:,} dev samples, "
            f"{feed.steps_per_epoch:,} steps an epoch"
        )
        self._say(
            f"{weights:,} weights in {len(self.state.model.trainable_variables)} tensors, "
            f"{groups} reduction groups, "
            f"{3 * flops.count(self.state.model) / 1e9:.2f} GFLOP a training sample"
        )
        for key, value in {
            "submission_benchmark": self.experiment.name,
            "global_batch_size": settings.batch * size,
            "train_samples": feed.train.count,
            "eval_samples": feed.dev.count,
            "seed": self.experiment.seed,
            "opt_name": settings.optimizer.name,
            "opt_base_learning_rate": settings.optimizer.lr,
            "number_of_ranks": size,
        }.items():
            self.recorder.event(key, value)

    def _report_profile(self) -> None:
        report = self.profile.finish()
        if report is not None:
            mean = {name: value * 1e3 for name, value in report["mean"].items()}
            self._say(
                f"profile of {len(report['steps'])} steps: allreduce {mean['allreduce']:.1f} ms, "
                f"exposed {mean['exposed']:.1f} ms, negotiation {mean['negotiation']:.2f} ms and "
                f"queue {mean['queue']:.2f} ms a tensor; see {self.profile.path.parent}"
            )

    def _conclude(self, stopped: str | None) -> None:
        """The final lines: slow ranks, samples/s and where the time went."""
        self.warnings.tell()
        for line in self.efforts.report(self.clock.totals, self.ranks):
            self._say(line)
        step, totals = self.position.step, self.clock.totals
        busy = totals["data"] + totals["compute"] + totals["reduction"]
        samples = step * self.experiment.train.batch * self.ranks.size
        self._say(
            f"{'stopped by ' + stopped if stopped else 'done'} at step {step:,}: "
            f"{samples / max(busy, 1e-9):.1f} samples/s; {self.clock.split()}"
        )

    def _say(self, message: str) -> None:
        say(f"train: {message}", rank=self.ranks.rank)
