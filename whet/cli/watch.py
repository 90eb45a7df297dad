"""``whet watch``: shows runs on a live page in a browser."""

from pathlib import Path
from typing import Annotated

import typer

from whet.base.extras import require
from whet.cli.arguments import run_folder


def watch(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, drawn in the same charts.")],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: a free one.")] = 0,
    host: Annotated[
        str,
        typer.Option("--host", help="Address to listen on. 0.0.0.0: any client with the token, without encryption."),
    ] = "127.0.0.1",
    browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Show runs on a live page while they train. For example: whet watch runs/a runs/b"""
    require("serve", "whet watch", "starlette", "uvicorn")
    import asyncio

    from whet.watch.server import Watch

    folders = list(dict.fromkeys(run_folder(run).resolve() for run in runs))

    async def serve() -> None:
        page = Watch(folders, host, port)
        print(f"{page.url}\nstop with Ctrl-C", flush=True)
        if browser:
            import webbrowser

            await asyncio.to_thread(webbrowser.open, page.url)
        try:
            await page.serve()
        finally:
            await page.close()

    try:
        asyncio.run(serve())
    except KeyboardInterrupt:
        print("stopped")
