"""The output of a command, of which only the beginning and the end are kept."""

import os
from contextlib import suppress

_PIECE = 1 << 16


class Output:
    """Collects from a pipe that doesn't block, within ``keep`` bytes. ``cut_middle``: keep the end as well as the
    beginning, with a note between them."""

    def __init__(self, keep: int, cut_middle: bool) -> None:
        self.first, self.last = (keep // 2, keep - keep // 2) if cut_middle else (keep, 0)
        self.head, self.tail, self.left_out, self.open = b"", b"", 0, True

    def take(self, reader: int) -> bool:
        """Take what is in the pipe. Return whether there was anything."""
        with suppress(BlockingIOError):
            data = os.read(reader, _PIECE)
            self.open = bool(data)
            space = self.first - len(self.head)
            self.head += data[:space]
            tail = self.tail + data[space:]
            self.tail = tail[len(tail) - self.last :] if len(tail) > self.last else tail
            self.left_out += len(tail) - len(self.tail)
            return self.open
        return False

    def drain(self, reader: int) -> None:
        """Take the rest; all writers have ended."""
        while self.take(reader):
            pass

    def bytes(self) -> bytes:
        note = f"\n[{self.left_out} bytes are left out]\n".encode() if self.left_out and self.last else b""
        return self.head + note + self.tail
