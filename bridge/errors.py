"""The one exception that a user is meant to see."""


class UserError(Exception):
    """A request that cannot be served: bad file, bad value, unsafe input. Nothing was changed.

    The command line prints the message without a traceback and exits with code 2. The message is one
    clear sentence that names the file and the field and says what to do.
    """


def printable(text: object) -> str:
    """The text with escapes in place of control characters and stray surrogates: a name in a file is its writer's."""
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in str(text))


class WorkFailedError(Exception):
    """The request was fine but the work failed. The command line exits with code 1."""
