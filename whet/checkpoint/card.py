"""The README.md of an exported model: what it is, where it comes from, how good it is, how to load it."""

from pathlib import Path
from typing import Any, Literal

from whet.checkpoint.store import Checkpoint
from whet.metrics.sinks.jsonl import FILE as METRICS
from whet.metrics.sinks.jsonl import read_metrics

Kind = Literal["policy", "adapter", "reward model"]

_USE: dict[Kind, str] = {
    "policy": """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```
""",
    "adapter": """```python
from transformers import AutoTokenizer
from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```
""",
    "reward model": """```python
from transformers import AutoModelForSequenceClassification, AutoTokenizer

model = AutoModelForSequenceClassification.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
conversation = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]
tokens = tokenizer.apply_chat_template(conversation, return_tensors="pt")
score = model(**tokens).logits[0, 0]
```

The score is read at the last token of the whole conversation, as the chat template writes it.
""",
}


def model_card(run: Path, recipe: dict[str, Any], checkpoint: Checkpoint, base: str, dtype: str, kind: Kind) -> str:
    """Markdown with the front matter that the Hugging Face Hub reads. ``recipe`` is the run's, as plain data."""
    what = {"policy": "Trained from", "adapter": "A LoRA adapter for", "reward model": "A reward model trained from"}
    facts = {
        "run": run.resolve().name,
        "recipe": recipe.get("description") or "see recipe.yaml of the run",
        "algorithm": _type(recipe.get("algorithm")),
        "data": _type(recipe.get("data")),
        "step": f"{checkpoint.step} of {recipe.get('steps', '?')}",
        "type": dtype,
    }
    rows = "\n".join(f"| {name} | {_cell(value)} |" for name, value in facts.items())
    hub = f"base_model: {base}\n" if "/" in base and not Path(base).expanduser().exists() else ""
    library = "peft" if kind == "adapter" else "transformers"
    task = "text-classification" if kind == "reward model" else "text-generation"
    return (
        f"---\nlibrary_name: {library}\n{hub}pipeline_tag: {task}\ntags:\n- whet\n---\n\n"
        f"# {facts['run']}, step {checkpoint.step}\n\n{what[kind]} `{base}` with whet.\n\n"
        f"| | |\n|---|---|\n{rows}\n\n{_evaluation(run, checkpoint)}## Use\n\n{_USE[kind]}"
    )


def _evaluation(run: Path, checkpoint: Checkpoint) -> str:
    """The evaluation at the checkpoint's step, if there was one; beside it that of the untrained model, if known."""
    lines = {m["step"]: m for m in read_metrics(run / METRICS) if m.get("kind") == "evaluation"}
    after, before = lines.get(checkpoint.step), lines.get(0)
    if after is None:
        return "Not evaluated at this step.\n\n"
    rows = ""
    for name, value in after.items():
        if name.startswith("evaluation/") and isinstance(value, int | float):
            start = before.get(name) if before is not None else None
            shown = f"{start:.4g}" if isinstance(start, int | float) else "-"
            rows += f"| {name.removeprefix('evaluation/')} | {shown} | {value:.4g} |\n"
    return f"## Evaluation\n\n| measure | step 0 | step {checkpoint.step} |\n|---|---|---|\n{rows}\n"


def _type(component: Any) -> str:
    return str(component.get("type", "?")) if isinstance(component, dict) else str(component)


def _cell(value: str) -> str:
    return value.replace("|", "\\|").replace("\n", " ")
