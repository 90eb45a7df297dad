"""System calls of Linux for which Python has no function."""

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)

NO_NEW_PRIVILEGES, SECCOMP = 38, 22  # options of prctl


def call(name: str, *arguments: int | bytes | None) -> int:
    """Call a C function; return its result. Raises ``OSError`` with its name if it fails."""
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = int(getattr(_libc, name)(*wide))
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result
