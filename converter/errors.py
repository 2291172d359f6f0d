"""The ways a run can end other than well, each with the exit code that Jobs rely on.

Exit codes: 0 done; 1 a bug; 2 the request is wrong and retrying is useless; 3 the world failed and retrying
can help; 4 a check found a difference; 143 ended by SIGTERM.
"""

from __future__ import annotations


class ConverterError(Exception):
    """A failure whose message is one line for the user: what is wrong, where, what to do.

    Attributes:
      stuck: threads of the run wait for what may not come for minutes; end the process without them.
    """

    exit_code = 1
    stuck = False


class RequestError(ConverterError):
    """The request or its source is wrong; the same command will fail again."""

    exit_code = 2


class WorldError(ConverterError):
    """The disk, the network or a service failed; the same command can succeed later."""

    exit_code = 3


class CheckError(ConverterError):
    """A comparison found a difference."""

    exit_code = 4


class Terminated(BaseException):
    """SIGTERM arrived. Not an `Exception`, so that nothing on the way out mistakes it for a failure.

    Attributes:
      stuck: what it ended had not come to an end in time.
    """

    exit_code = 143
    stuck = False


_LONGEST_LINE = 2000


def error_line(error: BaseException) -> str:
    """An error's text as one printable line of bounded length, whatever a hostile file made it quote."""
    line = "".join(char if char.isprintable() else "?" for char in " ".join(str(error).split()))
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}..."
