"""The two ways to end that are no defect of the program: a message for the user, or a signal."""


class UserError(Exception):
    """Something the user can mend: a wrong key, a missing file, a full disk.

    The message names the file, the key, the value found and the value wanted, and says what to do.
    The commands print it in one line and end with exit code 2, on every rank, with no traceback.
    """


class Interrupted(Exception):
    """A signal stopped the work, on every rank, in a state from which the same command goes on.

    The message says so. The commands print it in one line and end with exit code 75.
    """


EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 75  # sysexits' EX_TEMPFAIL: stopped early with a checkpoint; run again to go on
