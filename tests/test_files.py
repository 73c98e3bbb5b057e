"""Files appear whole or not at all."""

import json

import numpy as np
import pytest

from stemdl import files
from stemdl.errors import UserError


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.txt"
    files.write_bytes(path, b"old")
    with pytest.raises(RuntimeError), files.appearing(path) as temporary:
        temporary.write_bytes(b"half of the ne")
        raise RuntimeError
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_json_carries_schema_and_version_and_refuses_others(tmp_path):
    path = tmp_path / "a.json"
    files.write_json(path, "stemdl.test/1", {"values": np.arange(3), "one": np.float32(0.5)})
    assert files.read_json(path, "stemdl.test/1")["values"] == [0, 1, 2]
    assert json.loads(path.read_text())["stemdl_version"]
    with pytest.raises(UserError, match=r"schema is 'stemdl.test/1', wanted 'stemdl.test/2'"):
        files.read_json(path, "stemdl.test/2")
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(path, "stemdl.test/1", {"values": float("nan")})
    path.write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        files.read_json(path, "stemdl.test/1")
    with pytest.raises(UserError, match="cannot be read"):
        files.read_json(tmp_path / "none.json", "stemdl.test/1")


def test_bytes_for_people():
    assert [files.human_bytes(count) for count in (12, 1536, 277_000_000, 5e17)] == [
        "12 B",
        "1.5 kB",
        "277.0 MB",
        "500.0 PB",
    ]
