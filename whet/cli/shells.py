"""``whet shells``: opens runtimes of shells for runs on other machines."""

import os
import secrets
from typing import Annotated

import typer

_TOKEN = "WHET_SHELLS_TOKEN"


def shells(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings: runtime, most, host, port, certificate, key."),
    ] = None,
) -> None:
    """Open shells for runs on other machines, which set data.runtime to {type: remote, url: ...}. For example: whet
    shells most=100 runtime.limits.memory_mib=2048"""
    from whet.base.addresses import key_in
    from whet.config.loading import load_overrides
    from whet.shells.serving import RuntimeServer, ShellServer

    token = key_in(_TOKEN if os.environ.get(_TOKEN) else None, "whet shells") or secrets.token_urlsafe(24)
    with RuntimeServer(load_overrides(ShellServer, overrides or []), token) as server:
        shown = f"the value of {_TOKEN}" if os.environ.get(_TOKEN) else token
        print(f"shells are opened at {server.url}\ntoken: {shown}\nstop with Ctrl-C", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("stopped")
