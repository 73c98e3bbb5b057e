"""The checks of `stemdl check`. Each is called by all ranks, returns what to tell of rank 0, and
raises UserError with the remedy on the ranks where something is wrong.

A check may hold collectives; all of its ranks reach them before any raises.
"""

import os
import platform
import shutil
import time
from collections import Counter
from importlib import metadata
from pathlib import Path

import numpy as np

import stemdl
from stemdl import files, filesystems
from stemdl.data import shards, stage_plan
from stemdl.data.shards import Shard
from stemdl.data.stage_plan import SPLITS
from stemdl.errors import UserError
from stemdl.ranks import Ranks, host
from stemdl.reduction import levers
from stemdl.schema import Experiment

PACKAGES = ("tensorflow", "tensorflow-cpu", "keras", "horovod", "mpi4py", "numpy", "h5py")
CLOCK_LIMIT = 0.5  # s; wall limits and logs are read off rank 0's clock
LATENCY_LIMIT = 0.1  # s for a number over all ranks; more means a wrong network or oversubscription
PAYLOAD = 64 << 20  # bytes of the bandwidth measurement; as a fusion buffer of gradients
SPEED_BYTES = 64 << 20  # written to a staging disk


def layout(ranks: Ranks) -> str:
    """How many ranks on how many nodes."""
    nodes = Counter(ranks.collect(host()))
    text = f"{ranks.size} rank{'s' if ranks.size > 1 else ''} on {len(nodes)} node"
    text += "s" if len(nodes) > 1 else ""
    if len(set(nodes.values())) > 1:
        few = min(nodes, key=lambda name: nodes[name])
        text += f", unevenly: {nodes[few]} on {few}, up to {max(nodes.values())} on others"
    return text


def versions(experiment: Experiment, ranks: Ranks) -> str:
    """The same Python and packages on every rank."""
    mine = {"Python": platform.python_version(), "stemdl": stemdl.__version__}
    for name in PACKAGES:
        try:
            mine[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    first = ranks.share(mine)
    differing = {name for name in mine | first if mine.get(name) != first.get(name)}
    if differing:
        name = min(differing)
        raise UserError(
            f"{name} is {mine.get(name, 'missing')}, on rank 0 {first.get(name, 'missing')}; start "
            "all ranks from one environment (environment.python, environment.archive of the site)"
        )
    return ", ".join(f"{name} {version}" for name, version in mine.items())


def devices(experiment: Experiment, ranks: Ranks) -> str:
    """A GPU for every rank, and NCCL to reduce on it, where TensorFlow is a GPU build."""
    import tensorflow as tf

    from stemdl.training import devices as training_devices

    training_devices.set_up(experiment.train, experiment.seed, ranks)  # as the training will
    gpus = tf.config.list_physical_devices("GPU")
    if not tf.test.is_built_with_gpu_support():
        cores = len(os.sched_getaffinity(0))
        return f"{cores} cores; TensorFlow is a CPU build and looks for no GPU"
    if not gpus:
        raise UserError(
            "sees no GPU: ask for them in the job (node.gpus of the site file), and load the "
            "driver's libraries"
        )
    if len(gpus) not in (1, ranks.local_size):
        raise UserError(
            f"sees {len(gpus)} GPUs for {ranks.local_size} ranks on its node, wanted one for each "
            "(node.gpus and node.ranks of the site file)"
        )
    if ranks.size > 1:
        import horovod.tensorflow as hvd

        if not hvd.nccl_built():
            raise UserError(
                "Horovod reduces without NCCL, through host memory: run scripts/setup with "
                "HOROVOD_GPU_OPERATIONS=NCCL"
            )
    name = tf.config.experimental.get_device_details(gpus[0]).get("device_name", "GPU")
    return f"{len(gpus)} x {name} to each rank, NCCL"


def clocks(experiment: Experiment, ranks: Ranks) -> str:
    """Clocks that agree. The spread includes the ranks' way out of a barrier."""
    best = None
    for _ in range(5):
        ranks.barrier()
        times = np.array(ranks.collect(time.time()))
        offset = times[ranks.rank] - np.median(times)
        best = offset if best is None or abs(offset) < abs(best) else best
    offsets = np.abs(ranks.collect(float(best or 0.0)))
    if abs(best or 0.0) > CLOCK_LIMIT:
        raise UserError(
            f"its clock is {best:+.1f} s off the others', wanted within {CLOCK_LIMIT} s; "
            "ask the site to mend NTP on this node, or leave the node out"
        )
    return f"within {max(offsets) * 1e3:.1f} ms of each other"


def allreduce(experiment: Experiment, ranks: Ranks) -> str:
    """Horovod's sums are right; latency of one number and bandwidth of 64 MiB."""
    if ranks.size == 1:
        return "one rank: nothing to reduce"
    with ranks.together("starting Horovod"):
        levers.start(experiment.reduction, ranks)
        import horovod.tensorflow as hvd
        import tensorflow as tf

    def best_of(count: int, name: str, tensor: tf.Tensor) -> tuple[float, tf.Tensor]:
        seconds = []
        for _ in range(count + 1):  # the first also negotiates
            ranks.barrier()
            begun = time.perf_counter()
            found = hvd.allreduce(tensor, op=hvd.Sum, name=name)
            found = found.numpy()
            seconds.append(time.perf_counter() - begun)
        return min(ranks.share(seconds[1:])), found

    latency, total = best_of(10, "check.latency", tf.constant([1.0 + ranks.rank]))
    payload = tf.ones(PAYLOAD // 4) * (1.0 + ranks.rank)
    seconds, sums = best_of(3, "check.bandwidth", payload)
    wanted = ranks.size * (ranks.size + 1) / 2
    if total[0] != wanted or not np.all(sums == wanted):
        raise UserError(
            f"an allreduce over all ranks gives {total[0]:g}, wanted {wanted:g}; Horovod and the "
            "launcher must use one MPI: run scripts/setup --force within the job's modules"
        )
    if latency > LATENCY_LIMIT:
        raise UserError(
            f"an allreduce of one number takes {latency * 1e3:.0f} ms, wanted less than "
            f"{LATENCY_LIMIT * 1e3:.0f} ms; see that MPI uses the fast network and ranks have cores"
        )
    # Bus bandwidth as NCCL's tests define it: what each rank's port carries in a ring.
    bus = 2 * (ranks.size - 1) / ranks.size * PAYLOAD / seconds
    return (
        f"{files.human_bytes(PAYLOAD)} at {files.human_bytes(bus)}/s (bus bandwidth), "
        f"latency {latency * 1e6:.0f} µs"
    )


def data(experiment: Experiment, ranks: Ranks) -> str:
    """Every shard opens and its first sample reads, each by one rank; a split is of one kind."""
    directory, paths = experiment.data.dir, {}
    with ranks.together("listing the data set"):
        if ranks.rank == 0:  # alone: so many listings at once would stall the file system
            paths = {split: shards.source_paths(directory, split) for split in SPLITS}
            if missing := [split for split in SPLITS if not paths[split]]:
                raise UserError(f"{directory / missing[0]}: no shards (*.h5); set data.dir")
    paths = ranks.share(paths)
    found: dict[str, list[Shard]] = {split: [] for split in SPLITS}
    fault: UserError | None = None
    try:
        for split in SPLITS:
            for path in paths[split][ranks.rank :: ranks.size]:
                shard = shards.open_source(path, experiment.data.records)
                shards.read_samples(shard, [0])
                found[split].append(shard)
    except UserError as error:
        fault = error
    first = ranks.share({split: each[0] for split, each in found.items() if each})
    counts = ranks.collect(sum(shard.count for each in found.values() for shard in each))
    if fault is not None:
        raise fault
    for split, each in found.items():
        for shard in each:
            if split in first and _kind(shard) != _kind(first[split]):
                raise UserError(
                    f"{shard.path}: holds samples of another kind than {first[split].path.name} "
                    "(shapes, dtypes or sampling); keep one kind in a split"
                )
    total = sum(len(each) for each in paths.values())
    return f"{total} shards, {sum(counts):,} samples in {directory}"


def _kind(shard: Shard) -> tuple:
    return (shard.cbed_shape, shard.cbed_dtype, shard.potential_shape, shard.axes)


def storage(experiment: Experiment, ranks: Ranks) -> str:
    """stage.dir is a disk of the node's own, with room for the node's share of the data."""
    if experiment.stage.dir is None:
        return "no staging (stage.dir is null): ranks read data.dir itself"
    share = stage_plan.plan(experiment, ranks)
    base = share.target.parent
    probe = base / f".check-{host()}-{ranks.local_rank}"
    fault, speed = None, 0.0
    try:
        base.mkdir(parents=True, exist_ok=True)
        speed = _write_speed(probe, own=ranks.local_rank == 0)
    except OSError as error:
        fault = f"{base}: cannot be written ({error.strerror}); set stage.dir to the node's disk"
    names = set(ranks.collect(probe.name))
    strangers = {name for name in names if not name.startswith(f".check-{host()}-")}
    ranks.barrier()
    seen = sorted(name for name in strangers if (base / name).exists())
    ranks.barrier()
    probe.unlink(missing_ok=True)
    if fault is not None:
        raise UserError(fault)
    kind = filesystems.kind(base) or "of an unknown kind"
    if seen or filesystems.is_shared(kind):
        raise UserError(
            f"{base}: is shared between nodes ({kind}); set stage.dir to a disk of the node's own"
        )
    if kind in filesystems.IN_MEMORY:
        raise UserError(
            f"{base}: is memory, not a disk ({kind}); set stage.dir to the node's disk "
            "(Summit and Frontier: /mnt/bb/$USER, asked for with -alloc_flags nvme or -C nvme)"
        )
    wanted = sum(item.bytes for item in share.items) + experiment.stage.keep_free * 1e9
    held = sum(path.stat().st_size for path in share.target.rglob("*") if path.is_file())
    free = shutil.disk_usage(base).free + held
    if free < wanted:
        raise UserError(
            f"{base}: has {files.human_bytes(free)} free, wanted {files.human_bytes(wanted)} "
            "(this node's share of the data and stage.keep_free); use more nodes or a larger disk"
        )
    return (
        f"{base}: {kind}, {files.human_bytes(free)} free of which {files.human_bytes(wanted)} "
        f"are needed, writes {files.human_bytes(speed)}/s"
    )


def run(experiment: Experiment, ranks: Ranks) -> str:
    """RUN can be written, by rank 0."""
    target = experiment.run
    if ranks.rank == 0:
        try:
            files.write_bytes(target / ".check", b"")
            (target / ".check").unlink()
        except OSError as error:
            raise UserError(f"{target}: cannot be written ({error.strerror}); set run") from error
    return f"{target} can be written"


def _write_speed(probe: Path, *, own: bool) -> float:
    """Leave `probe` behind; bytes/s of writing it durably, if `own`, else just its name."""
    block = os.urandom(1 << 20)
    begun = time.perf_counter()
    with probe.open("wb", buffering=0) as file:
        for _ in range(SPEED_BYTES >> 20 if own else 0):
            file.write(block)
        os.fsync(file.fileno())
    return SPEED_BYTES / (time.perf_counter() - begun) if own else 0.0
