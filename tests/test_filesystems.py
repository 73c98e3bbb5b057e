"""Kinds of file systems, from tables in the form of /proc/mounts."""

from pathlib import Path

import pytest

from stemdl import filesystems

TABLE = """\
/dev/root / ext4 rw 0 0
tmpfs /dev/shm tmpfs rw 0 0
/dev/mapper/bb /mnt/bb/ann xfs rw 0 0
alpine /gpfs/alpine gpfs rw 0 0
later /gpfs/alpine lustre rw 0 0
spaced /mnt/a\\040b nfs4 rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/mnt/bb/ann/data", "xfs"),
        ("/mnt/bb/annie", "ext4"),
        ("/dev/shm/x", "tmpfs"),
        ("/gpfs/alpine/abc123", "lustre"),
        ("/mnt/a b/x", "nfs4"),
        ("/", "ext4"),
    ],
)
def test_the_longest_and_latest_mount_holds_a_path(tmp_path, path, kind):
    mounts = tmp_path / "mounts"
    mounts.write_text(TABLE)
    assert filesystems.kind(Path(path), mounts) == kind


def test_no_table_no_kind(tmp_path):
    assert filesystems.kind(tmp_path, tmp_path / "missing") is None


def test_this_machines_memory_is_known_as_memory():
    assert filesystems.kind(Path("/dev/shm")) in filesystems.IN_MEMORY


@pytest.mark.parametrize(
    ("kind", "shared"), [("lustre", True), ("fuse.sshfs", True), ("xfs", False), (None, False)]
)
def test_what_nodes_share(kind, shared):
    assert filesystems.is_shared(kind) is shared
