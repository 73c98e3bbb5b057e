"""The one kind of error that is a message for the user, not a defect of the program."""


class UserError(Exception):
    """Something the user can mend: a wrong key, a missing file, a full disk.

    The message names the file, the key, the value found and the value wanted, and says what to do.
    The commands print it in one line and end with exit code 2, on every rank, with no traceback.
    """


EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 75  # sysexits' EX_TEMPFAIL: stopped early with a checkpoint; run again to go on
