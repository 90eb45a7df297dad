"""Which lines of a traceback a user has written, so that these are what an error shows."""

import sysconfig
import traceback
from pathlib import Path

import whet

_OTHERS = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {str(Path(whet.__file__).parent), "<frozen"}
)


def is_own(filename: str) -> bool:
    """Return whether a file is a user's: not of Python, of an installed package or of whet."""
    return not filename.startswith(_OTHERS)


def own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the user's frames of an exception, the innermost last; where there are none, the innermost alone."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if is_own(frame.filename)] or list(frames[-1:])


def own_lines(error: BaseException) -> str:
    """Return the last of the user's lines and the exception, as a traceback shows them."""
    shown = traceback.format_list(own_frames(error)[-3:])
    return "".join([*shown, *traceback.format_exception_only(error)]).rstrip()
