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
    # During the imports below, nothing else could answer an interrupt in one line.
    _before = signal.signal(signal.SIGINT, _stop)
    from whet.cli.main import main

    signal.signal(signal.SIGINT, _before)
else:
    from whet.cli.main import main

__all__ = ["main"]
