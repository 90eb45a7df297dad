"""Finds user code in tracebacks, so that errors show the user's lines."""

import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

import whet

_OTHERS = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {str(Path(whet.__file__).parent), "<frozen"}
)


def is_user_file(filename: str) -> bool:
    """Return whether a file is user code: not part of Python, of an installed package or of whet."""
    return not filename.startswith(_OTHERS)


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the user's frames of an exception, the innermost last; without any, the innermost frame. Of an error in a
    child process (``service.py``), they are the child's."""
    if child_frames := getattr(error, "child_frames", None):
        return list(child_frames)
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if is_user_file(frame.filename)] or list(frames[-1:])


def user_lines(error: BaseException) -> str:
    """Return the user's last lines and the exception, in the format of a traceback."""
    shown = traceback.format_list(user_frames(error)[-3:])
    return "".join([*shown, *traceback.format_exception_only(error)]).rstrip()


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
