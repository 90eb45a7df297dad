"""Thoughts of replies, removed from a share of the rows or cut to a budget in another, so that a model learns to answer
without them and when they are ended early (Nemotron Nano 3 and Llama-Nemotron, arXiv 2505.00949, train on 10% and 3%).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from whet.base.seeds import derive_seed
from whet.base.strict_json import JsonObject
from whet.chat.thinking import split_thinking

if TYPE_CHECKING:
    from whet.chat.renderer import Renderer
    from whet.prep.config import Thoughts

_LARGEST = 1 << 63  # of derived seeds
Change = Callable[[str, dict[str, Any]], str | None]
"""Changes the fields of a row, given its place; returns what was done, or None."""


def changes(config: "Thoughts", seed: int, renderer: "Renderer | None") -> Change:
    """Return the function that changes rows. The choices follow from the seed and the row's place. ``renderer`` is
    needed for budgets, which are in tokens."""

    def change(where: str, fields: JsonObject) -> str | None:
        if not config.removed + config.cut:
            return None
        position = derive_seed(seed, "thoughts", where) / _LARGEST
        if position < config.removed:
            return "thoughts removed" if _each(fields, lambda thought: "") else None
        if position < config.removed + config.cut:
            assert renderer is not None
            budget = config.budgets[derive_seed(seed, "budget", where) % len(config.budgets)]
            return "thoughts cut" if _each(fields, lambda thought: _cut(thought, budget, renderer)) else None
        return None

    return change


def _each(fields: dict[str, object], change: Callable[[str], str]) -> bool:
    """Change the thought of every reply, and return whether any is another now."""
    changed = False
    for name, messages in fields.items():
        if not isinstance(messages, list):
            continue
        for index, message in enumerate(messages):
            if not isinstance(message, dict) or message.get("role") != "assistant":
                continue
            apart = split_thinking(message)  # type: ignore[arg-type]
            thought = apart.get("reasoning_content")
            if thought and (other := change(thought)) != thought:
                kept = {key: value for key, value in apart.items() if key != "reasoning_content"}
                fields[name] = messages = [*messages]
                messages[index] = kept | ({"reasoning_content": other} if other else {})
                changed = True
    return changed


def _cut(thought: str, budget: int, renderer: "Renderer") -> str:
    tokens = renderer.encode_text(thought)
    return thought if len(tokens) <= budget else renderer.decode(tokens[:budget]).rstrip("\ufffd")
