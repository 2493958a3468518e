"""The one exception that a user is meant to see."""


class UserError(Exception):
    """A request that cannot be served: bad file, bad value, unsafe input. Nothing was changed.

    The command line prints the message without a traceback and exits with code 2. The message is one
    clear sentence that names the file and the field and says what to do.
    """


class WorkFailedError(Exception):
    """The request was fine but the work failed. The command line exits with code 1."""
