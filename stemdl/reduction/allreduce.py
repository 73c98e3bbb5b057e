"""Groups of gradients become Horovod operations inside the training step's graph.

One TensorFlow operation holds a whole group: it waits for the group's last gradient, and Horovod
then reduces the group in one piece. Names are stable from step to step, so Horovod's response cache
(the bitvector) answers without negotiation.
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
        gradients: tensors of any float dtype and shape, the same on all ranks.
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
        sent = [tf.cast(gradients[index], WIRE[wire]) for index in group]
        received = hvd.grouped_allreduce(
            sent,
            op=hvd.Sum,
            prescale_factor=1 / size,
            name=f"{name}.{order}",
            ignore_name_scope=True,
        )
        for index, tensor in zip(group, received, strict=True):
            averages[index] = tf.cast(tensor, gradients[index].dtype)
    return averages
