"""How commands end."""

import pytest

from stemdl import command
from stemdl.errors import Interrupted, UserError


def ending(error):
    def main():
        raise error

    return command.run(main)


def test_the_exit_code_is_passed_on():
    assert command.run(lambda: 7) == 7


def test_a_users_mistake_is_one_line(capsys):
    assert ending(UserError("data/x.h5: truncated")) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "stemdl: data/x.h5: truncated\n")


def test_a_signal_is_one_line_and_says_run_again(capsys):
    assert ending(Interrupted("stage: stopped by SIGTERM")) == 75
    assert capsys.readouterr().err == "stemdl: stage: stopped by SIGTERM\n"


def test_ctrl_c_is_silent(capsys):
    assert ending(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == ""


def test_a_defect_shows_where(capsys):
    assert ending(ZeroDivisionError("a defect")) == 1
    error = capsys.readouterr().err
    assert "ZeroDivisionError: a defect" in error and __file__ in error


@pytest.mark.mpi
def test_a_defect_on_one_rank_ends_all():
    from conftest import run_ranks

    code = (
        "import sys; from stemdl import command, ranks\n"
        "def main():\n"
        "    here = ranks.discover()\n"
        "    if here.rank == 1: raise ZeroDivisionError('a defect')\n"
        "    here.barrier()\n"
        "    return 0\n"
        "sys.exit(command.run(main))"
    )
    result = run_ranks(2, ["-c", code], timeout=60)
    assert result.returncode != 0
    assert "rank 1: " in result.stderr and "ZeroDivisionError: a defect" in result.stderr
