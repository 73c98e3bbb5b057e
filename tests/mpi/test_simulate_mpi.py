"""stemdl-data simulate under mpirun."""

import pytest
from conftest import run_ranks
from small_simulation import contents, write_experiment

from data_tools import cli

pytestmark = pytest.mark.mpi
COMMAND = ["-m", "data_tools.cli", "simulate"]


def test_ranks_make_the_bytes_of_one_process(tmp_path):
    alone, ranks = (write_experiment(tmp_path, name) for name in ("alone", "ranks"))
    assert cli.main(["simulate", str(alone), "simulate.workers=1"]) == 0
    result = run_ranks(2, [*COMMAND, str(ranks)])
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("made 10 samples") == 1
    assert contents(tmp_path / "ranks") == contents(tmp_path / "alone")


def test_a_mistake_is_one_line_and_exit_code_2_on_all_ranks(tmp_path):
    path = write_experiment(tmp_path)
    (tmp_path / "data").write_text("in the way")
    for override, message in [
        ("simulate.materials.cif_dir=absent", "no such folder"),
        ("simulate.scan_step=4", "wider than simulate.box"),
        ("simulate.seed=0", "cannot be written"),
    ]:
        result = run_ranks(2, [*COMMAND, str(path), override])
        assert result.returncode == 2, result.stderr
        lines = [line for line in result.stderr.splitlines() if line.startswith("stemdl: ")]
        assert len(lines) == 1 and message in lines[0]
        assert "Traceback" not in result.stderr
