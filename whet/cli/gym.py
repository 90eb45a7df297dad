"""``whet gym``: a task set for those who train with NeMo Gym."""

import asyncio
from pathlib import Path
from typing import Annotated, Literal

import typer

from whet.cli.words import Overrides


def gym(
    target: Annotated[
        str, typer.Argument(metavar="TASKSET|RECIPE", help="A task set (its settings follow: path=...) or a recipe.")
    ],
    overrides: Overrides = None,
    rows: Annotated[Path | None, typer.Option("--rows", help="Write the tasks as rows of Gym here, and end.")] = None,
    split: Annotated[Literal["train", "test"], typer.Option("--split", help="Of the rows.")] = "train",
    agent: Annotated[str, typer.Option("--agent", help="The name of Gym's agent, for the rows.")] = "whet_simple_agent",
    host: Annotated[str, typer.Option("--host", help="Beyond 127.0.0.1 anybody may ask.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535)] = 12000,
) -> None:
    """Serve a task set's grader as a resources server of NeMo Gym, or write its tasks as Gym's rows."""
    from whet.cli.targets import recipe_of
    from whet.endpoint.gym import check_single_turn, serve
    from whet.tasks.gym.rows import write_rows

    tasks = recipe_of(target, overrides or []).taskset
    if rows is not None:
        asyncio.run(check_single_turn(tasks))
        print(f"{write_rows(tasks, split, agent, rows)} rows in {rows}")
        return

    def ready(address: str) -> None:
        print(f"resources server on {address} (seed_session, verify); end it with Ctrl-C", flush=True)

    try:
        asyncio.run(serve(tasks, host, port, ready))
    except KeyboardInterrupt:
        print("ended")
