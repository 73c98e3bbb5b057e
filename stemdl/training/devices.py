"""This rank's GPU or share of the cores."""

import os

import keras
import tensorflow as tf

from stemdl.ranks import Ranks
from stemdl.schema import Train


def set_up(settings: Train, seed: int, ranks: Ranks) -> None:
    """Pin this rank to its GPU or cores and seed it. Call before any other use of TensorFlow."""
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[ranks.local_rank % len(gpus)], "GPU")
    tf.config.threading.set_intra_op_parallelism_threads(threads(settings.threads, ranks))
    tf.config.threading.set_inter_op_parallelism_threads(2)
    keras.utils.set_random_seed(seed)
    if settings.deterministic:
        tf.config.experimental.enable_op_determinism()


def threads(wanted: int | None, ranks: Ranks) -> int:
    """Cores for this rank: `wanted`, or those it is bound to, or an even share of the node's."""
    if wanted is not None:
        return wanted
    usable = len(os.sched_getaffinity(0))
    bound_by_launcher = usable < (os.cpu_count() or usable)
    return usable if bound_by_launcher else max(1, usable // ranks.local_size)
