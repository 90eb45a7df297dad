"""``whet gym``: offers a task set to NeMo Gym, as a server or as rows."""

import asyncio
from pathlib import Path
from typing import Annotated, Literal

import typer

from whet.base.errors import ConfigError
from whet.base.extras import extra
from whet.cli.arguments import TaskOverrides

_AGENT, _HOST, _PORT = "whet_simple_agent", "127.0.0.1", 12000


def gym(
    target: Annotated[
        str, typer.Argument(metavar="TASKSET|RECIPE", help="A task set (its settings follow: path=...) or a recipe.")
    ],
    overrides: TaskOverrides = None,
    rows: Annotated[
        Path | None, typer.Option("--rows", help="Write the tasks as Gym rows to this file; start no server.")
    ] = None,
    split: Annotated[Literal["train", "test"], typer.Option("--split", help="Split of the rows.")] = "train",
    agent: Annotated[str, typer.Option("--agent", help="Name of the Gym agent in the rows.")] = _AGENT,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on. Any client that can reach it may send requests.")
    ] = _HOST,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: a free one.")] = _PORT,
) -> None:
    """Serve a task set's grader as a NeMo Gym resources server, or write its tasks as Gym rows."""
    from whet.cli.arguments import recipe_of
    from whet.tasks.gym.rows import write_rows
    from whet.tasks.gym.single_turn import check_single_turn

    if rows is None and (split, agent) != ("train", _AGENT):
        raise ConfigError("--split and --agent describe the rows of --rows; give it, or leave them out")
    if rows is not None and (host, port) != (_HOST, _PORT):
        raise ConfigError("--rows starts no server; leave out --host and --port")
    if rows is None:
        with extra("serve", "whet gym"):
            from whet.endpoint.gym import serve
    tasks = recipe_of(target, overrides or []).taskset
    if rows is not None:
        asyncio.run(check_single_turn(tasks))
        print(f"{write_rows(tasks, split, agent, rows)} rows in {rows}")
        return

    def ready(address: str) -> None:
        print(f"resources server on {address} (seed_session, verify); stop it with Ctrl-C", flush=True)

    try:
        asyncio.run(serve(tasks, host, port, ready))
    except KeyboardInterrupt:
        print("stopped")
