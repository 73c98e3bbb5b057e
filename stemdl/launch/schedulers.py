"""The schedulers by the name that `--on` and site files use."""

from stemdl.launch import flux, local, lsf, slurm
from stemdl.launch.job import Queue, Scheduler

QUEUES: dict[str, Queue] = {"lsf": lsf, "slurm": slurm, "flux": flux}
ALL: dict[str, Scheduler] = {**QUEUES, "local": local}
