"""When is each gradient ready?

    operations, outputs = trace(gradients, signature)       # from the graph, nothing is run
    predicted = predict(operations, outputs, rates)         # on a device of these rates
    measured = measure(gradients, batch)                    # a few steps on the device at hand
    rates = fit_rates((operations, outputs, measured.ready))  # the device that this would be

`gradients` is any function of a batch that returns the list of gradients, such as
`of_model(model, loss)`; the model may be anyone's. Times are in seconds after the start of a step.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf
from scipy.optimize import nnls

from stemdl.reduction import costs
from stemdl.reduction.costs import Operation

Gradients = Callable[..., Sequence[tf.Tensor | None]]
Loss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]  # (targets, outputs) -> scalar


@dataclass(frozen=True)
class Rates:
    """What a device does in a second. An operation takes the sum of its three parts."""

    flops: float  # multiplications and additions of convolutions and matrix products [FLOP/s]
    bandwidth: float  # reading inputs and writing outputs [B/s]
    overhead: float  # starting an operation [s]

    def seconds(self, operation: Operation) -> float:
        work = operation.flops / self.flops + operation.bytes / self.bandwidth
        return work + self.overhead * operation.launches


@dataclass(frozen=True)
class Timeline:
    """Ready time of each gradient [s], in the order of the function's outputs; 0 for None."""

    ready: tuple[float, ...]
    end: float  # when forward and backward pass are done [s]
    critical_path: float | None = None  # the same with unlimited parallelism [s]; None: unknown


def of_model(model: keras.Model, loss: Loss) -> Gradients:
    """The gradients of the loss in the order of `model.trainable_variables`."""

    def gradients(inputs: tf.Tensor, targets: tf.Tensor) -> Sequence[tf.Tensor | None]:
        with tf.GradientTape() as tape:
            value = loss(targets, model(inputs, training=True))
        return tape.gradient(value, [each.value for each in model.trainable_variables])

    return gradients


def of_sketch(model: keras.Model, loss: Loss) -> tuple[Gradients, list[tf.TensorSpec]]:
    """As `of_model`, for a model whose variables have no values (`layouts.sketch`).

    Returns:
        The function, which takes the weights after inputs and targets, and the weights' signature.
    """
    count = len(model.trainable_variables)
    weights = [*model.trainable_variables, *model.non_trainable_variables]

    def gradients(
        inputs: tf.Tensor, targets: tf.Tensor, *values: tf.Tensor
    ) -> Sequence[tf.Tensor | None]:
        trainable, fixed = list(values[:count]), list(values[count:])
        with tf.GradientTape() as tape:
            tape.watch(trainable)
            outputs, _ = model.stateless_call(trainable, fixed, inputs, training=True)
            value = loss(targets, outputs)
        return tape.gradient(value, trainable)

    return gradients, [tf.TensorSpec(each.shape, each.dtype) for each in weights]


def trace(
    gradients: Gradients, signature: Sequence[tf.TensorSpec]
) -> tuple[list[Operation], list[int | None]]:
    """The operations of one forward and backward pass, from the graph; nothing is run.

    Args:
        signature: shapes of the batch, without unknown dimensions; costs follow from them.

    Returns:
        The operations in an order in which they can run, and for each gradient the place of the
        operation that yields it; None where the loss does not depend on the variable.
    """
    positions: list[int] = []

    def dense(*batch: tf.Tensor) -> list[tf.Tensor]:
        found = gradients(*batch)
        positions[:] = [place for place, each in enumerate(found) if each is not None]
        positions.append(len(found))
        return [tf.convert_to_tensor(each) for each in found if each is not None]

    function = tf.function(dense, autograph=False).get_concrete_function(*signature)
    operations, producers = costs.flatten(function.graph)
    outputs: list[int | None] = [None] * positions.pop()
    for position, producer in zip(positions, producers, strict=True):
        outputs[position] = producer
    return operations, outputs


def predict(
    operations: Sequence[Operation], outputs: Sequence[int | None], rates: Rates
) -> Timeline:
    """Ready times on a device that runs one operation after another.

    What can run is run in the order in which it became possible: so TensorFlow's executor hands
    kernels to a GPU's stream, or to a CPU with one thread for operations.
    """
    seconds = [rates.seconds(operation) for operation in operations]
    done = [0.0] * len(operations)
    clock = 0.0
    for place in execution_order(operations):
        clock += seconds[place]
        done[place] = clock
    longest = [0.0] * len(operations)
    for place, operation in enumerate(operations):
        before = max((longest[needed] for needed in operation.needs), default=0.0)
        longest[place] = before + seconds[place]
    ready = tuple(0.0 if place is None else done[place] for place in outputs)
    return Timeline(ready, clock, max(longest, default=0.0))


def execution_order(operations: Sequence[Operation]) -> list[int]:
    """First come, first served: places of the operations in the order in which they run."""
    followers: list[list[int]] = [[] for _ in operations]
    missing = [len(operation.needs) for operation in operations]
    for place, operation in enumerate(operations):
        for needed in operation.needs:
            followers[needed].append(place)
    queue = deque(place for place, count in enumerate(missing) if count == 0)
    order = []
    while queue:
        place = queue.popleft()
        order.append(place)
        for follower in followers[place]:
            missing[follower] -= 1
            if missing[follower] == 0:
                queue.append(follower)
    return order


def python_clock() -> tf.Tensor:
    """The time now, at this place of the graph [s]. Costs 30 μs; tf.timestamp costs 2."""
    return tf.numpy_function(time.perf_counter, [], tf.float64)


def measure(
    gradients: Gradients,
    batch: Sequence[tf.Tensor],
    *,
    steps: int = 10,
    warm_up: int = 3,
    clock: Callable[[], tf.Tensor] = tf.timestamp,
) -> Timeline:
    """Run a few steps and read the clock as each gradient appears; medians over the steps.

    One element of each gradient is brought to the host, and the clock is read when it has arrived.
    That is when Horovod can have it, on CPUs and on GPUs alike (there a kernel is only enqueued
    when its operation returns), and it needs no profiler. The graph is built without TensorFlow's
    automatic control dependencies, which would read all of the clocks one after another; so updates
    of state, such as batch statistics, are left out. Where operations must be deterministic
    TensorFlow refuses its own clock: give `python_clock`.
    """
    present: list[int] = []

    def clocked(*inputs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        start = clock()
        with tf.control_dependencies([start]):
            inputs = tuple(tf.identity(each) for each in inputs)
        found = gradients(*inputs)
        present[:] = [place for place, each in enumerate(found) if each is not None]
        present.append(len(found))
        clocks, probes = [start], []
        for gradient in found:
            if gradient is None:
                continue
            with tf.device("CPU:0"):
                probe = tf.reshape(tf.convert_to_tensor(gradient), [-1])[:1]
                with tf.control_dependencies([probe]):
                    clocks.append(clock())
            probes.append(tf.cast(probe, tf.float32))
        # The probes are returned, or the optimiser of graphs would drop what they come from.
        return tf.stack(clocks), tf.concat(probes, 0)

    signature = [tf.TensorSpec(each.shape, each.dtype) for each in batch]
    function = tf.compat.v1.wrap_function(clocked, signature)
    runs = [function(*batch)[0].numpy() for _ in range(warm_up + steps)][warm_up:]
    elapsed = np.median([clocks[1:] - clocks[0] for clocks in runs], axis=0)
    ready = np.zeros(present.pop())
    ready[present] = elapsed
    return Timeline(tuple(ready.tolist()), float(elapsed.max()))


def fit_rates(*cases: tuple[Sequence[Operation], Sequence[int | None], Sequence[float]]) -> Rates:
    """The rates that explain measured ready times best (non-negative least squares).

    Each case is one network on the same device: operations and outputs as `trace` gives them, and
    the measured ready times. A gradient is ready after all operations that run before it, so its
    time is linear in the seconds per FLOP, per byte and per operation. What the networks do not
    show, because other parts explain their times, comes out free: an infinite rate.
    """
    rows, times = [], []
    for operations, outputs, ready in cases:
        order = execution_order(operations)
        work = np.array([(each.flops, each.bytes, each.launches) for each in operations])
        work[order] = np.cumsum(work[order], axis=0)
        for place, moment in zip(outputs, ready, strict=True):
            if place is not None:
                rows.append(work[place])
                times.append(moment)
    matrix = np.array(rows)
    scale = np.maximum(matrix.max(axis=0), 1.0)
    flops, moved, launch = nnls(matrix / scale, np.array(times))[0] / scale
    return Rates(
        flops=float(1 / flops) if flops > 0 else np.inf,
        bandwidth=float(1 / moved) if moved > 0 else np.inf,
        overhead=float(launch),
    )
