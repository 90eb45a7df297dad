"""The README.md of an exported model: its origin, its evaluation, and how to load it. The text is in
``card.md.jinja``."""

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from whet.base.files import expanded
from whet.base.strict_json import JsonObject
from whet.checkpoint.store import Checkpoint
from whet.lineage.record import Record
from whet.metrics.sinks.jsonl import FILE as METRICS
from whet.metrics.sinks.jsonl import read_metrics

Kind = Literal["policy", "adapter", "reward model", "gguf", "megatron"]
_TEMPLATE = Path(__file__).with_name("card.md.jinja")
_ORIGIN = {"adapter": "A LoRA adapter for", "reward model": "A reward model trained from"}  # others: trained from
_FOLDERS = re.compile(r"(?<![\w.:/~])[~/][^,\[\]{}'\"]*/")  # at the beginning of an absolute path


@dataclass(frozen=True, slots=True)
class ModelClass:
    """The class of transformers that loads an exported model."""

    name: str
    family: str | None = None  # with which it is made, if transformers doesn't have it


def model_card(
    run: Path,
    recipe: JsonObject,
    checkpoint: Checkpoint,
    base: str,
    dtype: str,
    kind: Kind,
    loader: ModelClass,
    lineage: Record,
    policy: str = "",
) -> str:
    """Return Markdown with the front matter that the Hugging Face Hub reads. ``recipe`` is the run's, as plain data;
    ``policy`` the name of one of its further policies."""
    from huggingface_hub import ModelCard, ModelCardData

    images = recipe.get("model", {}).get("vision") is not None
    data = ModelCardData(
        base_model=base if "/" in base and not expanded(base).exists() else None,
        library_name={"adapter": "peft", "gguf": "gguf", "megatron": "megatron-core"}.get(kind, "transformers"),
        pipeline_tag="text-classification"
        if kind == "reward model"
        else "image-text-to-text"
        if images
        else "text-generation",
        tags=["whet"],
        datasets=sorted(set(_hub_data(lineage))) or None,
    )
    policies: dict[str, JsonObject] = recipe.get("policies") or {}
    facts = {"policy": f"{policy}, which plays {', '.join(policies[policy]['plays'])}"} if policy else {}
    facts |= {
        "run": run.resolve().name,
        "recipe": recipe.get("description") or "see recipe.yaml of the run",
        "algorithm": _type(recipe.get("algorithm")),
        "data": _type(recipe.get("data")),
        "step": f"{checkpoint.step} of {recipe.get('steps', '?')}",
        "type": dtype,
    }
    card: ModelCard = ModelCard.from_template(
        data,
        template_str=_TEMPLATE.read_text(encoding="utf-8"),
        run=facts["run"],
        step=checkpoint.step,
        origin=_ORIGIN.get(kind, "Trained from"),
        base=_name(base),
        facts=facts,
        measured=_measured(run, checkpoint.step, policy, policies),
        kind=kind,
        loader=loader,
        images=images,
        quantized=_quantized(recipe) if kind == "adapter" else None,
        lineage=list(_origins(lineage, 0)),
    )
    return f"{card}\n"


def _quantized(recipe: JsonObject) -> str | None:
    lora: JsonObject | None = recipe.get("model", {}).get("lora")
    return lora.get("quantize") if lora else None


def _hub_data(lineage: Record) -> Iterator[str]:
    """Yield the data sets of the Hugging Face Hub in a history."""
    for record in lineage.history():
        for source in record.inputs:
            if source.name.startswith("hf:"):
                yield source.name.split(":")[1].partition("@")[0]


def _origins(record: Record, depth: int) -> Iterator[str]:
    """Yield the history as a nested list in Markdown. Folders of this machine are left out of the names."""
    for source in record.inputs:
        facts = [source.licence, f"commit {source.revision}" if source.maker is None and source.revision else ""]
        count = len(source.files)
        facts += [f"{count} file{'s' if count > 1 else ''}, {source.digest}" if count else ""]
        about = ", ".join(fact for fact in facts if fact)
        yield f"{'  ' * depth}- {source.setting}: `{_name(source.name)}`{f' ({about})' if about else ''}"
        if (maker := source.maker) is not None:
            seed = f", seed {maker.seed}" if maker.seed is not None else ""
            command = f": `{_without_folders(maker.sessions[0].command)}`" if maker.sessions else ""
            yield f"{'  ' * (depth + 1)}- from the {maker.kind} `{Path(maker.folder).name}`{seed}{command}"
            yield from _origins(maker, depth + 2)


def _without_folders(command: str) -> str:
    """
    >>> _without_folders("whet train sft data.path='/home/me/my data/a.jsonl' model=Qwen/Qwen3-0.6B --folder ~/runs/b")
    'whet train sft data.path=a.jsonl model=Qwen/Qwen3-0.6B --folder b'
    """
    return shlex.join(_FOLDERS.sub("", word) for word in shlex.split(command))


def _name(path: str) -> str:
    """
    >>> _name("/home/me/data/train-*.jsonl"), _name("hf:openai/gsm8k:main:train"), _name("Qwen/Qwen3-0.6B")
    ('train-*.jsonl', 'hf:openai/gsm8k:main:train', 'Qwen/Qwen3-0.6B')
    """
    return Path(path).name if expanded(path).is_absolute() else path


def _measured(
    run: Path, step: int, policy: str, policies: Iterable[str]
) -> dict[str, tuple[float | None, float]] | None:
    """Return each measure of the main or the named policy as (of the untrained model or None, of the evaluation at
    ``step``); None without an evaluation."""
    lines = {line["step"]: line for line in read_metrics(run / METRICS) if line.get("kind") == "evaluation"}
    if step not in lines:
        return None
    prefix = f"evaluation/{policy}/" if policy else "evaluation/"
    others = tuple(f"evaluation/{name}/" for name in policies if name != policy)
    return {
        name.removeprefix(prefix): (lines.get(0, {}).get(name), after)
        for name, after in lines[step].items()
        if name.startswith(prefix) and not name.startswith(others) and isinstance(after, int | float)
    }


def _type(component: object) -> str:
    return str(component.get("type", "?")) if isinstance(component, dict) else str(component)
