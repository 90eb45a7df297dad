"""Errors meant for the user: the command line prints their message without a traceback."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class WhetError(Exception):
    """An error that the user can fix. The message says what is wrong, where, and what to do."""

    exit_code = 1
    label = "error"
    """The word that starts the error's line in the terminal."""


@contextmanager
def naming(subject: str) -> Iterator[None]:
    """Begin errors of the user in the block with their subject, as in ``"the evaluation set more"``; empty: don't."""
    try:
        yield
    except WhetError as error:
        if subject:
            error.args = (f"{subject}: {error}",)
        raise


class ConfigError(WhetError):
    """The recipe or an override is wrong."""

    exit_code = 2


class DataError(WhetError):
    """A data file or row is wrong."""


class RefitError(WhetError):
    """The generator doesn't hold the weights that the learner published. ``tensors``: the names of tensors that differ
    or are missing, if known."""

    def __init__(self, message: str, tensors: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.tensors = tuple(tensors)


class GeneratorError(WhetError):
    """An inference engine died, failed or did not start."""


class ReplicaLostError(GeneratorError):
    """One of several engines died or froze; its requests can be repeated on another engine."""


class DeadlineError(WhetError):
    """An operation took longer than its deadline."""


class OutOfMemoryError(WhetError):
    """An allocator, of a GPU or of the system, has no memory left; see ``whet.base.memory``."""


class CallError(WhetError):
    """A function call in a worker process failed: the function raised, or the worker died. Another call may succeed, so
    only the episode fails, not the run."""


class WorkerError(WhetError):
    """The process of a worker died."""


class WorkerStuckError(WorkerError, DeadlineError):
    """A worker hangs in a call and can't be used again."""
