"""``whet serve``: serves a trained model with OpenAI's API."""

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from whet.base.extras import require
from whet.cli.arguments import changes, warn_of_unread

if TYPE_CHECKING:
    from whet.tasks.base import Address

# Sections that are read where tasks are sampled: each call of a client says how its reply is sampled.
_OF_TASKS = ("data", "algorithm", "sampling", "rewards", "rollouts", "endpoint", "validation", "evaluation")


def serve(
    target: Annotated[
        str, typer.Argument(metavar="RUN|MODEL", help="Run folder (its best or newest checkpoint), folder or Hub id.")
    ],
    overrides: Annotated[list[str] | None, changes("generator.max_context=4096")] = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: a free one.")] = 8000,
    host: Annotated[
        str,
        typer.Option("--host", help="Address to listen on. 0.0.0.0: any client with the token, without encryption."),
    ] = "127.0.0.1",
    token: Annotated[
        str | None, typer.Option("--token", help="Secret that clients must send, instead of a random one.")
    ] = None,
) -> None:
    """Serve a model with OpenAI's API. For example: whet serve runs/quickstart-20260131-120000"""
    require("serve", "whet serve", "starlette", "uvicorn")
    from whet.algorithms.base import OnlineAlgorithm
    from whet.base.addresses import checked_key
    from whet.base.errors import ConfigError
    from whet.cli.evaluate import recipe_of_model, recipe_of_rows, run_of
    from whet.config import load
    from whet.processes.compute import run_computing
    from whet.run.recipe import Recipe
    from whet.run.serve import serve as served

    if token is not None:
        checked_key(token, "--token")
    run = run_of(target)
    if run is not None and isinstance(load(Recipe, target).value.algorithm, OnlineAlgorithm):
        settings = load(Recipe, target, overrides or []).value
    else:
        # Each call says how long its reply may be, so the quickstart's lengths must not limit the generator's context.
        given = [*(overrides or []), "sampling.max_prompt_tokens=1", "sampling.max_new_tokens=1"]
        settings = recipe_of_model(target, given) if run is None else recipe_of_rows(target, given)
    if run is not None and settings.policies:
        raise ConfigError(
            f"{target} trained several policies, and `whet serve` serves one: write one with `whet export {target} "
            "--out FOLDER` (of a further policy with --policy NAME), and serve the folder"
        )
    warn_of_unread(overrides or [], _OF_TASKS)
    name = Path(target).resolve().name if Path(target).exists() else target

    def ready(address: "Address") -> None:
        body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello"}]})
        url, header = f"{address.base_url}/chat/completions", f"Authorization: Bearer {address.api_key}"
        print(f"{name} is served at {address.base_url}\ntoken: {address.api_key}\n")
        print(f"{shlex.join(['curl', url, '-H', header, '-d', body])}\n")
        print("stop with Ctrl-C", flush=True)

    try:
        run_computing(served(settings, run, name=name, host=host, port=port, token=token, ready=ready))
    except KeyboardInterrupt:
        print("stopped")
