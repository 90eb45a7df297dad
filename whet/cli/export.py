"""``whet export``: writes a checkpoint as an ordinary model folder."""

from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from whet.base.lazy import FileDtype
from whet.checkpoint.gguf_file import GgufType
from whet.cli.arguments import AsJson, RunArgument, print_json, run_folder


def export(
    run: RunArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to create.")],
    step: Annotated[
        str | None,
        typer.Option(
            "--step", help="Step of the checkpoint, 'best' or 'latest'; by default the best, else the latest."
        ),
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Write only the LoRA adapter, not merged.")] = False,
    dtype: Annotated[
        FileDtype | None, typer.Option("--dtype", help="Precision of the weights, instead of the base model's.")
    ] = None,
    gguf: Annotated[
        GgufType | None,
        typer.Option("--gguf", help="Write one GGUF file, as llama.cpp reads, with matrices of this type."),
    ] = None,
    megatron: Annotated[
        bool, typer.Option("--megatron", help="Write the weights as a checkpoint of Megatron Core (torch_dist).")
    ] = False,
    name: Annotated[
        str | None,
        typer.Option("--name", help="Make it the next version of an artifact, to use as artifact:NAME:latest."),
    ] = None,
    push: Annotated[
        str | None, typer.Option("--push", metavar="USER/NAME", help="Also upload it to the Hugging Face Hub.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="With --push: not for the public.")] = False,
    policy: Annotated[
        str,
        typer.Option("--policy", metavar="NAME", help="One of the recipe's further policies, instead of the main one."),
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace the contents of the folder.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a run's model, or reward model, as a folder that transformers can load."""
    from whet.base.errors import ConfigError
    from whet.fetch.artifacts import PREFIX, check_name, register
    from whet.fetch.push import check_push
    from whet.fetch.push import push as upload

    if name is not None:
        check_name(name)
        if gguf is not None:
            raise ConfigError("--name makes an artifact that recipes load as a model, and --gguf a file for llama.cpp")
    if private and push is None:
        raise ConfigError("--private is about --push USER/NAME, which is not given")
    if step not in (None, "best", "latest") and not step.isdecimal():
        raise ConfigError(f"--step {step}: expected a whole number, 'best' or 'latest'")
    folder = run_folder(run)
    if push is not None:
        check_push(push)

    from whet.checkpoint.export import export as write

    which = int(step) if step and step.isdecimal() else cast(Literal["best", "latest"] | None, step)
    exported = write(
        folder, out, which, adapter_only=adapter, dtype=dtype, gguf=gguf, megatron=megatron, force=force, policy=policy
    )
    done: dict[str, object] = {"step": exported.step}

    def say(what: str, where: str) -> None:  # at once: what follows may fail
        done[what] = where
        if not as_json:
            print(f"{what}: {where}")

    say("written", str(exported.path))
    if name is not None:
        say("registered", f"{PREFIX}{register(name, out, exported.lineage.outputs)}")
    if push is not None:
        message = f"{folder.resolve().name}, step {exported.step}, by whet export"
        say("pushed", upload(out, push, message, private=private))
    if as_json:
        print_json(done)
