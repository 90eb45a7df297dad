"""Calls of the Linux kernel that Python has no function for."""

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)

NO_NEW_PRIVILEGES, SECCOMP = 38, 22  # of prctl


def call(name: str, *arguments: int | bytes | None) -> int:
    """Return what the C function returns. Raises ``OSError`` naming it where it fails."""
    wide = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    result = int(getattr(_libc, name)(*wide))
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result
