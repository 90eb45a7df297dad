"""Rollouts as values of JSON for a page, and the bounded sample of them that a report holds. ``assets/rollouts.js``
draws them."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from whet.base.strict_json import JsonObject
from whet.metrics.rollout_file import RolloutRecord, read_rollouts, rollout_steps
from whet.show.facts import rollout_rows
from whet.show.transcript import Part, task_data, transcript
from whet.show.view import ORDERS, ending, number, select, verdict

MOST_TOKENS = 1200  # per reply
MOST_CHARACTERS = 6000  # per observation, folded message, or answer without tokens
MOST_QUESTION = 200_000  # per prompt and user message, which are shown whole in all usual cases
MOST_BYTES = 4_000_000  # of all rollouts of a report together
_PIECE = 200  # characters per token
_PREVIEW = 160

_T = TypeVar("_T")


def sample_rollouts(run_folder: Path, most: int = 60, steps: int = 10) -> list[RolloutRecord]:
    """Choose at most ``most`` rollouts from at most ``steps`` steps spread over the run, including the first and last,
    and the other branches of their episodes.

    Per step: rollouts at equal distances from the highest to the lowest reward, and the one with the largest mismatch.
    """
    chosen: list[RolloutRecord] = []
    picked = _spread(rollout_steps(run_folder), min(steps, most))
    for step in picked:
        records = select(read_rollouts(run_folder, step), "reward")
        sample = _spread(records, most // len(picked))
        strangest = select(records, "mismatch")[:1]
        if strangest and strangest[0].mismatch is not None and not any(r is strangest[0] for r in sample):
            sample[len(sample) // 2] = strangest[0]
        episodes = {episode(record) for record in sample if record.uid}
        branches = [r for r in records if episode(r) in episodes and not any(r is taken for taken in sample)]
        chosen += sample + branches[:most]
    return chosen


def episode(record: RolloutRecord) -> str:
    """Return the name of the episode in its run. Branches of an episode share it."""
    return f"{record.step}/{record.uid}/{record.task}/{record.sample}"


def head(record: RolloutRecord) -> JsonObject:
    """Return a rollout's line in a list."""
    answer = record.answer or next((m["content"] for m in reversed(record.messages) if m["role"] == "assistant"), "")
    return {
        "episode": episode(record),
        "step": record.step,
        "task": record.task,
        "number": number(record),
        "verdict": verdict(record),
        "status": record.status,
        "ending": ending(record),
        "facts": rollout_rows(record)[0],
        "order": {name: _finite(key(record)) for name, key in ORDERS.items()},
        "preview": " ".join(str(answer)[: 2 * _PREVIEW].split())[:_PREVIEW],
    }


def card(record: RolloutRecord) -> JsonObject:
    """Return a whole rollout: its parts with the tokens of replies, the task's data and the scores."""
    return head(record) | {
        "parts": [_part(record, part) for part in transcript(record)],
        "data": [(name, value[:MOST_QUESTION]) for name, value in task_data(record)],
        "more": rollout_rows(record)[1],
        "error": record.error or "",
    }


def cards(records: Sequence[RolloutRecord], size_of: Callable[[JsonObject], int]) -> list[dict[str, object]]:
    """Return the cards up to ``MOST_BYTES`` in total, as ``size_of`` measures them."""
    made: list[JsonObject] = []
    size = 0
    for record in records:
        whole = card(record)
        size += size_of(whole)
        if size > MOST_BYTES and made:
            break
        made.append(whole)
    return made


def _part(record: RolloutRecord, part: Part) -> dict[str, object]:
    asked = part.label in ("prompt", "user") and not part.folded
    most = MOST_QUESTION if asked else MOST_CHARACTERS
    shown: JsonObject = {"label": part.label, "facts": part.facts, "folded": part.folded, "images": part.images}
    if part.tokens is None:
        return shown | {"text": part.text[:most], "cut": max(0, len(part.text) - most)}
    tokens = list(_tokens(record, part.tokens))
    return shown | {"tokens": tokens, "cut": len(part.tokens) - len(tokens)}


def _tokens(record: RolloutRecord, places: range) -> Iterator[tuple[str, int, float | None, float | None]]:
    """Yield (text, id, log-prob of the sampler, of the learner) of the first tokens."""
    learner, sampler = record.learner_logprobs or [], record.logprobs
    for i in places[:MOST_TOKENS]:
        old, new = (_rounded(values[i]) if i < len(values) else None for values in (sampler, learner))
        yield record.texts[i][:_PIECE], record.tokens[i], old, new


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _spread(items: Sequence[_T], most: int) -> list[_T]:
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)] if most > 1 else [items[-1]]
