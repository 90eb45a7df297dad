"""The README.md of an exported model: its origin, its evaluation, and how to load it. The text is in
``card.md.jinja``."""

from pathlib import Path
from typing import Any, Literal

from whet.checkpoint.store import Checkpoint
from whet.metrics.sinks.jsonl import FILE as METRICS
from whet.metrics.sinks.jsonl import read_metrics

Kind = Literal["policy", "adapter", "reward model"]
_TEMPLATE = Path(__file__).with_name("card.md.jinja")
_ORIGIN = {"policy": "Trained from", "adapter": "A LoRA adapter for", "reward model": "A reward model trained from"}


def model_card(run: Path, recipe: dict[str, Any], checkpoint: Checkpoint, base: str, dtype: str, kind: Kind) -> str:
    """Return Markdown with the front matter that the Hugging Face Hub reads. ``recipe`` is the run's, as plain data."""
    from huggingface_hub import ModelCard, ModelCardData

    data = ModelCardData(
        base_model=base if "/" in base and not Path(base).expanduser().exists() else None,
        library_name="peft" if kind == "adapter" else "transformers",
        pipeline_tag="text-classification" if kind == "reward model" else "text-generation",
        tags=["whet"],
    )
    facts = {
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
        origin=_ORIGIN[kind],
        base=base,
        facts=facts,
        measured=_measured(run, checkpoint.step),
        kind=kind,
    )
    return f"{card}\n"


def _measured(run: Path, step: int) -> dict[str, tuple[float | None, float]] | None:
    """Return each measure as (of the untrained model or None, of the evaluation at ``step``); None without an
    evaluation."""
    lines = {line["step"]: line for line in read_metrics(run / METRICS) if line.get("kind") == "evaluation"}
    if step not in lines:
        return None
    return {
        name.removeprefix("evaluation/"): (lines.get(0, {}).get(name), after)
        for name, after in lines[step].items()
        if name.startswith("evaluation/") and isinstance(after, int | float)
    }


def _type(component: Any) -> str:
    return str(component.get("type", "?")) if isinstance(component, dict) else str(component)
