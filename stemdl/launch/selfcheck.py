"""Does this installation reduce gradients? Two ranks, a grouped allreduce in a tf.function.

python -m stemdl.launch.selfcheck [RANKS]
"""

import os
import sys

from stemdl.launch import local


def check() -> None:
    """Run by each rank: sums that only all ranks together can give."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from stemdl import ranks as ranks_module

    ranks = ranks_module.discover()
    hvd.init(comm=ranks.comm)

    @tf.function(autograph=False)
    def reduce(values: list[tf.Tensor]) -> list[tf.Tensor]:
        return hvd.grouped_allreduce(values, op=hvd.Sum)

    found = reduce([tf.constant([1.0 + hvd.rank()]), tf.constant([10.0 * hvd.rank()])])
    count = hvd.size()
    wanted = [count * (count + 1) / 2, 10 * count * (count - 1) / 2]
    if [float(value[0]) for value in found] != wanted:
        raise SystemExit(f"self-check: rank {hvd.rank()} found {found}, wanted {wanted}")
    if hvd.rank() == 0:
        built = " and ".join(
            name for name, has in (("MPI", hvd.mpi_built()), ("Gloo", hvd.gloo_built())) if has
        )
        print(f"self-check: {count} ranks, TensorFlow {tf.__version__}, Horovod with {built}")


if __name__ == "__main__":
    if os.environ.get("STEMDL_SELFCHECK") == "rank":
        check()
    else:
        count = int(sys.argv[1]) if len(sys.argv) > 1 else 2
        module = ["-m", "stemdl.launch.selfcheck"]
        raise SystemExit(local.run(count, module, environment={"STEMDL_SELFCHECK": "rank"}))
