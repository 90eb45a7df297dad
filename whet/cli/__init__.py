"""The command line. Each command is one file that turns its arguments into one call of the library.

Nothing heavy is imported before a command needs it, so that ``whet --help`` answers at once.
"""

import os
import signal
import threading
from types import FrameType


def _stop(number: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted.\n")
    os._exit(130)


if threading.current_thread() is threading.main_thread():
    _before = signal.signal(
        signal.SIGINT, _stop
    )  # while what follows is imported, nothing else could say it in one line
    from whet.cli.main import main

    signal.signal(signal.SIGINT, _before)
else:
    from whet.cli.main import main

__all__ = ["main"]
