"""Run a command: a user's mistake becomes one line and an exit code, the same on every rank."""

import contextlib
import sys
import traceback
from collections.abc import Callable

from stemdl import ranks
from stemdl.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR, Interrupted, UserError

EXIT_DEFECT = 1
EXIT_CTRL_C = 130  # 128 + SIGINT, as shells say it


def run(main: Callable[[], int]) -> int:
    """Call `main` and return its exit code, for `sys.exit`.

    - UserError: `stemdl: message` on stderr, once (by rank 0), and 2. The error must be one that
      every rank raises: it came from the same arguments, or out of `Ranks.together`.
    - Interrupted: its message likewise, and 75.
    - KeyboardInterrupt: 130.
    - Anything else is a defect. Alone: the traceback and 1. Among ranks: the traceback with the
      rank's number, then all ranks end, for the others would wait for this one for ever.
    """
    try:
        return main()
    except UserError as error:
        if ranks.speaks():
            print(f"stemdl: {error}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR
    except Interrupted as stop:
        if ranks.speaks():
            print(f"stemdl: {stop}", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
    except KeyboardInterrupt:
        return EXIT_CTRL_C
    except Exception:
        by = ranks.launched()
        where = f"rank {by.rank}: " if by is not None and by.size != 1 else ""
        print(f"stemdl: {where}{traceback.format_exc()}", file=sys.stderr, flush=True)
        with contextlib.suppress(UserError):  # no MPI between the ranks: nobody waits
            here = ranks.discover()
            if here.size > 1:
                ranks.stop_all(here, EXIT_DEFECT)
        return EXIT_DEFECT
