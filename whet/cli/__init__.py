"""The command line. Each command is one file that turns its arguments into one call of the library.

Heavy packages are imported only when a command needs them, so ``whet --help`` answers at once.
"""

import os
import signal
import threading
from types import FrameType


def _stop(number: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted.\n")
    os._exit(130)


if threading.current_thread() is threading.main_thread():
    # An interrupt during the imports below prints one line, not a traceback.
    _before = signal.signal(signal.SIGINT, _stop)
    from whet.cli.main import main

    signal.signal(signal.SIGINT, _before)
else:
    from whet.cli.main import main

__all__ = ["main"]
