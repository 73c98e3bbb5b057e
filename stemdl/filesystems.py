"""What kind of file system a directory lies on: a node's disk, one that nodes share, or memory."""

import re
from pathlib import Path

IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
SHARED = {
    *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "panfs", "wekafs", "afs", "cifs"),
    *("pvfs2", "dvs"),
}
MOUNTS = Path("/proc/mounts")


def kind(path: Path, mounts: Path = MOUNTS) -> str | None:
    """Type of the file system that holds `path`, such as "xfs"; None if `mounts` does not say.

    `mounts` is a table in the form of /proc/mounts.
    """
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return None
    path = path.resolve()
    best: tuple[int, str | None] = (0, None)
    for line in lines:
        name, found = line.split()[1:3]
        point = Path(re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), name))
        if path.is_relative_to(point) and len(point.parts) >= best[0]:  # later ones lie on top
            best = (len(point.parts), found)
    return best[1]


def is_shared(kind: str | None) -> bool:
    """Whether nodes share a file system of this kind."""
    return kind in SHARED or (kind or "").startswith("fuse.")
