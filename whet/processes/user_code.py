"""Finds user code in tracebacks and classes, so that errors show the user's lines."""

import inspect
import sysconfig
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import AsyncGeneratorType, GeneratorType, TracebackType
from typing import TypeGuard

import whet
from whet.base.errors import ConfigError

_OTHERS = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {str(Path(whet.__file__).parent), "<frozen"}
)
_INSTALLED = {"site-packages", "dist-packages"}  # also of the Python on which a virtual environment is built

_YIELDS = "contains `yield`, so a call runs no line of it; write a function without `yield`"
_ASYNC = "is `async`, but is called as a plain function, which runs no line of it; write `def` in place of `async def`"

_LONGEST, _BEGINNING, _END = 4000, 2000, 1000  # characters of an exception's text


def is_user_file(filename: str) -> bool:
    """Return whether a file is user code: not part of Python, of an installed package or of whet."""
    return not filename.startswith(_OTHERS) and not _INSTALLED & set(Path(filename).parts)


def is_function(value: object) -> TypeGuard[Callable[..., object]]:
    """Return whether the value is a function or method, which has a name. From Python 3.14 on, ``inspect.isroutine``
    is also true for a ``partial``, which has none."""
    return inspect.isroutine(value) and not isinstance(value, partial)


def place_of(kind: type, method: str) -> str:
    """Return ``"MyTasks.grade (FILE:LINE)"`` of a method, for error messages."""
    return place_of_function(getattr(kind, method), f"{kind.__name__}.{method}")


def place_of_user(kind: type, method: str) -> str:
    """Return ``place_of`` for a class of the user, and an empty text for one of whet's."""
    code = getattr(inspect.unwrap(getattr(kind, method)), "__code__", None)
    return place_of(kind, method) if code and is_user_file(code.co_filename) else ""


def place_of_function(function: Callable[..., object], name: str) -> str:
    """Return ``"name (FILE:LINE)"`` of a function, for error messages."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return name + (f" ({code.co_filename}:{code.co_firstlineno})" if code else "")


def check_runs(function: object, name: str, awaited: bool = True) -> None:
    """Raise ``ConfigError`` for a function of which a call runs no line: it contains ``yield``, or it is ``async`` and
    its result is not ``awaited``. ``name`` is its name for the message."""
    if not callable(function):
        return
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"{place_of_function(function, name)} {_YIELDS}")
    if not awaited and inspect.iscoroutinefunction(function):
        raise ConfigError(f"{place_of_function(function, name)} {_ASYNC}")


def check_ran(result: object) -> None:
    """Raise ``ConfigError`` if a function returned a generator, because it contains ``yield``."""
    if isinstance(result, GeneratorType | AsyncGeneratorType):
        code = result.gi_code if isinstance(result, GeneratorType) else result.ag_code
        raise ConfigError(f"{result.__qualname__} ({code.co_filename}:{code.co_firstlineno}) {_YIELDS}")


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the user's frames of an exception, the innermost last; without any, the innermost frame. Of an error in a
    child process (``service.py``), they are the child's."""
    if child_frames := getattr(error, "child_frames", None):
        return list(child_frames)
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration | StopAsyncIteration):
        error = error.__cause__  # Python replaces these where a coroutine raises them, by an error of its caller
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if is_user_file(frame.filename)] or list(frames[-1:])


def user_lines(error: BaseException) -> str:
    """Return the user's last lines and the exception, in the format of a traceback."""
    shown = traceback.format_list(user_frames(error)[-3:])
    return "".join([*shown, brief("".join(traceback.format_exception_only(error)))]).rstrip()


def brief(text: str) -> str:
    """Return the text of an exception without its middle if it is very long, such as a whole page that a server sent:
    it is written again for each failed episode."""
    if len(text) <= _LONGEST:
        return text
    left_out = len(text) - _BEGINNING - _END
    return f"{text[:_BEGINNING]} [{left_out:,} characters left out] {text[-_END:]}"


def user_traceback(error: BaseException) -> TracebackType | None:
    """Return the traceback of an exception with the user's lines alone; without any, the whole traceback."""
    frames = list[TracebackType]()
    traced = error.__traceback__
    while traced is not None:
        if is_user_file(traced.tb_frame.f_code.co_filename):
            frames.append(traced)
        traced = traced.tb_next
    shown = None
    for each in reversed(frames):
        shown = TracebackType(shown, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return shown or error.__traceback__
