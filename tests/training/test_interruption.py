"""When a run ends early: signals that are heard, and ranks that are gone."""

import os
import signal
import subprocess
import sys

from stemdl.ranks import Ranks
from stemdl.training.interruption import Interruption


def test_a_signal_is_heard_at_the_next_check():
    interruption = Interruption(Ranks(), started=0.0, wall_limit=None)
    with interruption.listening():
        assert interruption.agree(1, 0.0)[0] is None
        os.kill(os.getpid(), signal.SIGUSR2)
        assert interruption.agree(2, 0.0)[0] == "SIGUSR2"


WATCHED = """
import time
from stemdl.ranks import Ranks
from stemdl.training.interruption import Watchdog

watchdog = Watchdog(0.2, Ranks())
with watchdog.watching():
    watchdog.beat("a long copy", patient=True)
    time.sleep(1)
    print("patient", flush=True)
    watchdog.beat("a step")
    time.sleep(60)
"""


def test_the_watchdog_waits_for_what_may_take_long_and_for_nothing_else():
    done = subprocess.run(
        [sys.executable, "-c", WATCHED], capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stdout) == (1, "patient\n")
    assert "a step has taken" in done.stderr
