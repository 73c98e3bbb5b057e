"""Slurm on this machine alone, with daemons and files of its own: real sbatch, srun and scancel.

    with running(directory) as environment:
        subprocess.run(["sbatch", ...], env=environment)

Needs Debian's slurm-wlm and munge (scripts/install-slurm), and no privileges.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CPUS = 4  # claimed, whatever there are: the daemons' own work then has room
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue")
CONFIGURATION = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.log
SlurmdSpoolDir={directory}/spool
StateSaveLocation={directory}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=batch Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def _find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def missing() -> list[str]:
    """The programs that are not installed."""
    return [program for program in PROGRAMS if _find(program) is None]


@contextmanager
def running(directory: Path) -> Iterator[dict[str, str]]:
    """Start the daemons; yield the environment for Slurm's commands; stop them at the end."""
    for name in ("spool", "state"):
        (directory / name).mkdir(parents=True)
    key = directory / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    configuration = directory / "slurm.conf"
    configuration.write_text(
        CONFIGURATION.format(
            directory=directory,
            host=socket.gethostname().split(".")[0],
            user=subprocess.run(["id", "-un"], capture_output=True, text=True).stdout.strip(),
            controller_port=_free_port(),
            node_port=_free_port(),
            cpus=CPUS,
        )
    )
    environment = os.environ | {"SLURM_CONF": str(configuration)}
    munge = [f"--{name}={directory}/munge.{name}" for name in ("socket", "seed-file", "pid-file")]
    munge += [f"--key-file={key}", f"--log-file={directory}/munge.log", "--foreground", "--force"]
    daemons = []
    try:
        for command in (["munged", *munge], ["slurmctld", "-D"], ["slurmd", "-D"]):
            program = _find(command[0])
            assert program is not None
            with (directory / f"{command[0]}.out").open("wb") as output:
                daemons.append(
                    subprocess.Popen(
                        [program, *command[1:]], env=environment, stdout=output, stderr=output
                    )
                )
            time.sleep(0.5)
        _wait_until_idle(environment, directory)
        yield environment
    finally:
        subprocess.run(["scancel", "--me"], env=environment, capture_output=True)
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(20)


def _wait_until_idle(environment: dict[str, str], directory: Path) -> None:
    for _ in range(60):
        found = subprocess.run(
            ["sinfo", "--noheader", "--format=%T"], env=environment, capture_output=True, text=True
        )
        if found.stdout.strip() == "idle":
            return
        time.sleep(0.5)
    logs = [path.read_text()[-2000:] for path in directory.glob("*.log")]
    raise RuntimeError("Slurm's node did not become idle:\n" + "\n".join(logs))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
