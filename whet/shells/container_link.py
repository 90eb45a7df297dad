"""The link of a container, whose only network is loopback: a Unix socket of the owner in a mounted folder.

    a command ── 127.0.0.1:LINK_PORT ──▶ a relay in the container (python3) ──▶ the socket ──▶ the owner ──▶ ``link()``

The relay runs with each command and as its user: a command can only cut itself off.
"""

import os
import socket
from collections.abc import Callable
from pathlib import Path

from whet.base.scratch import Scratch
from whet.shells.links import LINK_PORT, Link, accepting

STARTED = "whet-started"
"""The word that every script of a container writes to its errors first: the proof that the engine started it."""
FOLDER, NO_RELAY = "/whet-link", 98
"""The folder of the socket in the container; the exit status of a script whose relay can't start."""

# It continues in a fork once it listens, so that the command waits for that and no longer.
_RELAY = f"""
import asyncio, os, socket
listener = socket.create_server(("127.0.0.1", {LINK_PORT}))
listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
if os.fork():
    os._exit(0)
async def carry(reader, writer):
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()
async def taken(reader, writer):
    try:
        far_reader, far_writer = await asyncio.open_unix_connection("{FOLDER}/socket")
    except OSError:
        return writer.close()
    await asyncio.gather(carry(reader, far_writer), carry(far_reader, writer))
async def main():
    await (await asyncio.start_server(taken, sock=listener)).serve_forever()
asyncio.run(main())
"""
RELAYED = f"""
printf {STARTED} >&2
python3 -I -c '{_RELAY}' < /dev/null > /dev/null 2>&1 || exit {NO_RELAY}
"""
"""The beginning of a script: starts the relay."""


def listening(link: Link) -> tuple[Callable[[], None], Path]:
    """Carry the connections to a socket in a new folder. Return the function that ends this, and the folder."""
    scratch = Scratch("link")
    listener = socket.socket(socket.AF_UNIX)
    folder = os.open(scratch.path, os.O_PATH | os.O_DIRECTORY)
    try:  # by a short name of the folder: the name of a socket may have 107 characters
        listener.bind(f"/proc/self/fd/{folder}/socket")
    finally:
        os.close(folder)
    for path, access in ((scratch.path, 0o711), (scratch.path / "socket", 0o666)):  # for the user in the container
        path.chmod(access)
    listener.listen()
    close = accepting(listener, link)

    def unlink() -> None:
        close()
        scratch.remove()

    return unlink, scratch.path
