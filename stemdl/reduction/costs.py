"""What the operations of a TensorFlow graph cost: FLOPs, bytes moved, and what each one waits for.

Function calls are inlined, as TensorFlow does when it runs them; loops and branches stay one
operation, with the cost of all of their turns.
"""

import math
from dataclasses import dataclass, replace

import tensorflow as tf


@dataclass(frozen=True)
class Operation:
    """One operation of the graph. `needs` are places of others in the same list, all before it."""

    name: str
    type: str
    needs: tuple[int, ...]
    flops: float = 0.0  # 2 per multiply-add, of convolutions and matrix products
    bytes: float = 0.0  # read and written, of all that move data
    launches: float = 0.0  # 1 for an operation that does work, 0 for bookkeeping


# No work on the device: views, shapes, constants, variables handed on.
_FREE = {
    *("Const", "Placeholder", "Identity", "IdentityN", "ReadVariableOp", "VarHandleOp", "NoOp"),
    *("Reshape", "Shape", "ShapeN", "Size", "Rank", "ExpandDims", "Squeeze"),
    *("StopGradient", "PreventGradient", "BroadcastGradientArgs"),
}
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_LOOPS = ("While", "StatelessWhile")
_BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")


def flatten(graph: tf.Graph) -> tuple[list[Operation], list[int | None]]:
    """All operations that the outputs of a function's graph need.

    Returns:
        The operations, in an order in which they can run, and for each output the place of the
        operation that yields it; None for an output that is an input.
    """
    operations: list[Operation] = []
    outputs = _inline(graph, [None] * len(graph.inputs), operations)
    needed = {place for place in outputs if place is not None}
    for place in range(len(operations) - 1, -1, -1):
        if place in needed:
            needed.update(operations[place].needs)
    kept = {place: new for new, place in enumerate(sorted(needed))}
    pruned = [
        replace(operations[place], needs=tuple(kept[each] for each in operations[place].needs))
        for place in kept
    ]
    return pruned, [None if place is None else kept[place] for place in outputs]


def _inline(
    graph: tf.Graph, arguments: list[int | None], operations: list[Operation]
) -> list[int | None]:
    """Append the graph's operations; return which of them yields each output."""
    # Keyed by tensor name, unique in a graph: where a tensor comes from. None: from outside.
    producer = {each.name: place for each, place in zip(graph.inputs, arguments, strict=True)}
    last: dict[str, int] = {}  # by operation name, for control inputs
    for op in graph.get_operations():
        if op.type == "Placeholder" and op.outputs[0].name in producer:
            continue
        sources = [producer.get(each.name) for each in op.inputs]
        sources += [last.get(each.name) for each in op.control_inputs]
        needs = tuple(sorted({place for place in sources if place is not None}))
        if op.type in _CALLS:
            bound = [producer.get(each.name) for each in op.inputs]
            places = _inline(_callee(graph, op.get_attr("f").name), bound, operations)
            if operations:
                last[op.name] = len(operations) - 1
        else:
            flops, moved, launches = _cost(graph, op)
            operations.append(Operation(op.name, op.type, needs, flops, moved, launches))
            last[op.name] = len(operations) - 1
            places = [last[op.name]] * len(op.outputs)
        producer.update((each.name, place) for each, place in zip(op.outputs, places, strict=True))
    return [producer.get(each.name) for each in graph.outputs]


def _callee(graph: tf.Graph, name: str) -> tf.Graph:
    return graph._get_function(name).graph  # TensorFlow has no public way from a name to the graph


def _cost(graph: tf.Graph, op: tf.Operation) -> tuple[float, float, float]:
    """(FLOPs, bytes, launches) of one operation."""
    if op.type in _LOOPS:
        turns = _turns(op)
        flops, moved, launches = _total(_callee(graph, op.get_attr("body").name))
        return turns * flops, turns * moved, turns * launches
    if op.type in _BRANCHES:
        if "Case" in op.type:
            branches = op.get_attr("branches")
        else:
            branches = [op.get_attr("then_branch"), op.get_attr("else_branch")]
        return max(_total(_callee(graph, each.name)) for each in branches)
    if op.type in _FREE or not any(_is_data(each) for each in op.outputs):
        return 0.0, 0.0, 0.0
    moved = sum(_bytes(each) for each in [*op.inputs, *op.outputs])
    return _flops(op), moved, 1.0


def _turns(loop: tf.Operation) -> float:
    """The bound on the turns, which tf.while_loop makes the second input; 1 if it is not known."""
    bound = loop.inputs[1]
    while bound.op.type in ("Identity", "Max"):  # Keras takes the largest of one number
        bound = bound.op.inputs[0]
    value = tf.get_static_value(bound)
    return float(value) if value is not None and value.ndim == 0 and value > 0 else 1.0


def _total(graph: tf.Graph) -> tuple[float, float, float]:
    operations: list[Operation] = []
    _inline(graph, [None] * len(graph.inputs), operations)
    return (
        sum(each.flops for each in operations),
        sum(each.bytes for each in operations),
        sum(each.launches for each in operations),
    )


def _flops(op: tf.Operation) -> float:
    """2 per multiply-add. A convolution and both of its gradients cost the same."""
    kind = op.type
    if "Conv2d" in kind or "Conv2D" in kind or "Conv3D" in kind:
        if "BackpropInput" in kind:
            kernel, grid = op.inputs[1], op.inputs[2]
        elif "BackpropFilter" in kind:
            kernel, grid = op.outputs[0], op.inputs[2]
        else:
            kernel, grid = op.inputs[1], op.outputs[0]
        outputs = math.prod(_dims(kernel)[-2:] if "Depthwise" in kind else _dims(kernel)[-1:])
        return 2.0 * _elements(grid) * _elements(kernel) / max(outputs, 1)
    if kind in ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"):
        flipped = op.get_attr("transpose_a" if kind == "MatMul" else "adj_x")
        return 2.0 * _elements(op.outputs[0]) * _dims(op.inputs[0])[-2 if flipped else -1]
    if kind == "Einsum" and len(op.inputs) == 2:
        letters = op.get_attr("equation").decode().split("->")[0].split(",")
        sizes: dict[str, int] = {}
        for names, tensor in zip(letters, op.inputs, strict=True):
            sizes |= dict(zip(names.replace("...", ""), _dims(tensor), strict=False))
        return 2.0 * math.prod(sizes.values())
    return 0.0


def _dims(tensor: tf.Tensor) -> list[int]:
    """Static shape; an unknown dimension counts as 1."""
    return [1 if size is None else size for size in tensor.shape.as_list()] if tensor.shape else [1]


def _elements(tensor: tf.Tensor) -> int:
    return math.prod(_dims(tensor))


def _is_data(tensor: tf.Tensor) -> bool:
    return tensor.dtype.is_floating or tensor.dtype.is_complex


def _bytes(tensor: tf.Tensor) -> int:
    return _elements(tensor) * tensor.dtype.size if _is_data(tensor) else 0
