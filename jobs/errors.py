"""The ways a command can end other than well, each with its exit code.

Exit codes, the same as the converter's: 0 done; 1 a bug; 2 the request is wrong and retrying is useless;
3 the world failed and retrying can help; 4 a check found a difference.
"""


class JobsError(Exception):
    """A failure whose message is one line for the user: what is wrong, where, what to do."""

    exit_code = 1


class RequestError(JobsError):
    """The request is wrong; the same command will fail again."""

    exit_code = 2


class WorldError(JobsError):
    """The network, the cluster or a service failed; the same command can succeed later."""

    exit_code = 3
