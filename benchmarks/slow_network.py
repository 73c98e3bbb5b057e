"""Ranks that reach each other over a slow network only: one network namespace each, rate-limited.

    with slow_network(ranks=4, megabits=200) as network:
        command = ["mpirun", "-n", "4", *network.command(["python", "worker.py"])]
        subprocess.run(command, env=os.environ | network.environment)

A bridge joins the namespaces; a token bucket (tc tbf) limits what each sends. MPI's shared memory
between ranks is turned off, so that all they exchange passes the limit. Needs root, ip and tc.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

SUBNET = "10.77.0"


@dataclass(frozen=True)
class Network:
    """How to start ranks: `prefix` goes before mpirun's program, which knows its rank."""

    prefix: tuple[str, ...]
    environment: dict[str, str]

    def command(self, program: Sequence[str]) -> list[str]:
        return [*self.prefix, *program]


FAST = Network((), {})


def available() -> bool:
    """Namespaces can be made and rates limited here."""
    return os.geteuid() == 0 and all(shutil.which(tool) for tool in ("ip", "tc"))


@contextmanager
def slow_network(ranks: int, megabits: int) -> Iterator[Network]:
    """Namespaces for `ranks` ranks that send `megabits` Mbit/s each; removed at the end."""
    name = f"sd{os.getpid()}"  # of the bridge; Linux allows 15 letters
    try:
        _run(f"ip link add {name} type bridge")
        _run(f"ip link set {name} up")
        for rank in range(ranks):
            space, port = f"{name}_{rank}", f"{name}p{rank}"
            inside = f"ip netns exec {space}"
            _run(f"ip netns add {space}")
            _run(f"ip link add {port} type veth peer name eth0 netns {space}")
            _run(f"ip link set {port} master {name} up")
            _run(f"{inside} ip addr add {SUBNET}.{rank + 1}/24 dev eth0")
            _run(f"{inside} ip link set lo up")
            _run(f"{inside} ip link set eth0 up")
            limit = f"rate {megabits}mbit burst 64kb latency 200ms"
            _run(f"{inside} tc qdisc add dev eth0 root tbf {limit}")
        yield Network(
            ("sh", "-c", f'exec ip netns exec {name}_$PMI_RANK "$@"', "rank"),
            {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0"},
        )
    finally:
        for rank in range(ranks):
            _run(f"ip netns del {name}_{rank}", check=False)
        _run(f"ip link del {name}", check=False)


def _run(command: str, check: bool = True) -> None:
    subprocess.run(command.split(), check=check, capture_output=not check)
