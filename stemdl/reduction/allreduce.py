"""Groups of gradients become Horovod operations inside the training step's graph.

A group is packed into one tensor when its last gradient is ready, reduced, and unpacked. Horovod's
own grouped allreduce would ask for, agree on and copy each member by itself; packed, a group costs
what one tensor costs. The copies are those that Horovod would make into and out of its fusion
buffer. Names are stable from step to step, so Horovod's response cache (the bitvector) answers
without negotiation.
"""

from collections.abc import Sequence

import tensorflow as tf

# Horovod 0.28 has no bfloat16 operations for TensorFlow.
WIRE = {"fp32": tf.float32, "fp16": tf.float16}


def average(
    gradients: Sequence[tf.Tensor],
    groups: Sequence[Sequence[int]],
    *,
    size: int,
    wire: str = "fp32",
    name: str = "gradients",
) -> list[tf.Tensor]:
    """Average `gradients` over all ranks, group by group.

    Args:
        gradients: tensors of any float dtype and static shape, the same on all ranks.
        groups: indices into `gradients`, in the order in which the groups are sent.
        size: number of ranks; 1 returns the gradients as they are.
        wire: dtype on the network. The sum is divided before it is formed, so that fp16 does not
            overflow with the number of ranks.
        name: prefix of the operations' names; unique in a step.

    Returns:
        The averages, in the order and dtypes of `gradients`.

    Raises:
        ValueError: the groups are not a partition of the gradients. A gradient left out would
            silently stay local, one sent twice would be wrong.
    """
    if sorted(index for group in groups for index in group) != list(range(len(gradients))):
        raise ValueError(f"groups {groups} do not hold each of {len(gradients)} gradients once")
    if size == 1:
        return list(gradients)
    import horovod.tensorflow as hvd

    averages: list[tf.Tensor | None] = [None] * len(gradients)
    for order, group in enumerate(groups):
        members = [gradients[index] for index in group]
        received = hvd.allreduce(
            _pack(members, WIRE[wire]),
            op=hvd.Sum,
            prescale_factor=1 / size,
            name=f"{name}.{order}",
            ignore_name_scope=True,
        )
        for index, tensor in zip(group, _unpack(received, members), strict=True):
            averages[index] = tensor
    return averages


def _pack(members: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
    """All numbers of the members in one vector; one member alone stays as it is."""
    if len(members) == 1:
        return tf.cast(members[0], dtype)
    return tf.concat([_shaped(tf.cast(each, dtype), [-1]) for each in members], 0)


def _unpack(packed: tf.Tensor, members: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """What `_pack` made, in the members' shapes and dtypes."""
    if len(members) == 1:
        return [tf.cast(packed, members[0].dtype)]
    parts = tf.split(packed, [each.shape.num_elements() for each in members])
    return [
        tf.cast(_shaped(part, member.shape), member.dtype)
        for part, member in zip(parts, members, strict=True)
    ]


def _shaped(tensor: tf.Tensor, shape: Sequence[int | None]) -> tf.Tensor:
    """The tensor in that shape; no operation for a vector that is to be one: there are many."""
    return tensor if len(tensor.shape) == len(shape) == 1 else tf.reshape(tensor, shape)
