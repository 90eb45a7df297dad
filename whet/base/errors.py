"""Errors that are meant for the user: the command line prints their message without a traceback."""

from collections.abc import Iterable


class WhetError(Exception):
    """An error that the user can act on. The message says what is wrong, where, and what to do."""

    exit_code = 1
    label = "error"
    """What its line on the terminal begins with."""


class ConfigError(WhetError):
    """The recipe or an override is wrong."""

    exit_code = 2


class DataError(WhetError):
    """A data file or row is wrong."""


class RefitError(WhetError):
    """The generator doesn't hold the weights that the learner published. ``tensors``: the names of those that differ or
    are missing, where they are known."""

    def __init__(self, message: str, tensors: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.tensors = tuple(tensors)


class GeneratorError(WhetError):
    """The engine that samples died, failed or did not start."""


class ReplicaLostError(GeneratorError):
    """One of several engines died or froze; what it was in the middle of can be done again with the others."""


class DeadlineError(WhetError):
    """Something took longer than its deadline."""


class CallError(WhetError):
    """A call of a function in a worker process failed: the function raised, or the worker was lost. Another call may
    work, so this costs an episode and not the run."""


class WorkerError(WhetError):
    """A worker is gone: its process died."""


class WorkerStuckError(WorkerError, DeadlineError):
    """A worker is of no more use: it hangs in a call."""
