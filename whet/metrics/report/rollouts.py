"""The rollouts of a report: a bounded sample of a run's answers, each token coloured by how much the sampler and the
learner disagree about it. Everything that a model wrote passes through ``safe``."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TypeVar

from whet.metrics.catalog import show
from whet.metrics.rollout_file import RolloutRecord, read_rollouts, rollout_steps
from whet.metrics.view import level, select
from whet.metrics.visible import visible
from whet.types import Status

MOST_TOKENS = 1200  # per answer
MOST_CHARACTERS = 6000  # per prompt, or answer without tokens
MOST_BYTES = 4_000_000  # of all rollouts together
_PIECE = 200  # characters per token

_T = TypeVar("_T")


def safe(text: str) -> str:
    """Text of a model, or of anybody, as HTML text or the value of a quoted attribute."""
    return escape(visible(text), quote=True)


def sample_rollouts(run_folder: Path, most: int = 60, steps: int = 10) -> list[RolloutRecord]:
    """At most ``most`` rollouts from at most ``steps`` steps spread over the run, the first and last among them.

    Of each step, from the best to the worst at equal distances, and the one that sampler and learner agree on least."""
    chosen: list[RolloutRecord] = []
    picked = _spread(rollout_steps(run_folder), min(steps, most))
    for step in picked:
        records = select(read_rollouts(run_folder, step), "reward")
        found = _spread(records, most // len(picked))
        strangest = select(records, "mismatch")[:1]
        if strangest and strangest[0].mismatch is not None and not any(r is strangest[0] for r in found):
            found[len(found) // 2] = strangest[0]
        chosen += found
    return chosen


def browser(records: Sequence[RolloutRecord]) -> str:
    """The section's markup: controls, then one foldable card per rollout."""
    if not records:
        return '<p class="none">No rollouts were recorded.</p>'
    cards: list[str] = []
    size = 0
    for record in records:
        card = _card(record, opened=not cards)
        size += len(card.encode("utf-8", "replace"))
        if size > MOST_BYTES and cards:
            break
        cards.append(card)
    steps = sorted({record.step for record in records[: len(cards)]})
    options = "".join(f'<option value="{step}">step {step}</option>' for step in steps)
    return f"""
<div class="controls">
<label>Step <select id="by-step"><option value="">all</option>{options}</select></label>
<label>Show <select id="by-kind"><option value="">all</option><option>correct</option><option>wrong</option>
<option>completed</option><option>truncated</option><option>failed</option></select></label>
<label>Sort <select id="by-order"><option value="order">as sampled</option><option value="reward">reward</option>
<option value="advantage">advantage</option><option value="length">length</option>
<option value="mismatch">disagreement</option></select></label>
<span class="legend">learner finds it likelier <i class="u4"></i><i class="u3"></i><i class="u2"></i><i class="u1"></i>
<i></i><i class="d1"></i><i class="d2"></i><i class="d3"></i><i class="d4"></i> less likely than the sampler</span>
<span class="count" id="count">{len(cards)} rollouts</span>
</div>
<div id="cards">{"".join(cards)}</div>"""


def _card(record: RolloutRecord, opened: bool) -> str:
    verdict = {True: "correct", False: "wrong", None: ""}[record.correct]
    numbers = {
        "reward": record.reward,
        "advantage": record.advantage,
        "length": len(record.tokens),
        "mismatch": record.mismatch,
    }
    data = "".join(f' data-{name}="{value:.6g}"' for name, value in numbers.items() if value is not None)
    chips = [f'<b class="chip {verdict}">{verdict}</b>' if verdict else ""]
    if record.status != Status.COMPLETED:
        chips.append(f'<b class="chip bad">{safe(record.status)}</b>')
    facts = [f"{len(record.tokens)} tokens"]
    if record.reward is not None:
        facts.insert(0, f"reward <b>{show(record.reward)}</b>")
    if record.advantage is not None:
        facts.insert(1, f"advantage <b>{record.advantage:+.2f}</b>")
    scores = [f"{safe(name)} {show(value)}" for name, value in record.scores.items()]
    if record.versions:
        scores.append(
            f"weights {record.versions[0]}" + (f" to {record.versions[1]}" if len(set(record.versions)) > 1 else "")
        )
    if record.mismatch is not None:
        scores.append(f"largest disagreement {show(record.mismatch)}")
    error = f'<p class="error">{safe(record.error)}</p>' if record.error else ""
    kind = f"{verdict} {safe(record.status)}".strip()
    return (
        f'<details class="card"{" open" if opened else ""} data-step="{record.step}" data-kind="{kind}"{data}>'
        f'<summary><span class="at">{record.step}</span><span class="task">{safe(record.task)} '
        f"<small>#{record.sample}</small></span>{''.join(chips)}"
        f'<span class="facts">{" · ".join(facts)}</span></summary>'
        f'<div class="prompt">{_cut(record.prompt)}</div><div class="answer">{_answer(record)}</div>{error}'
        f'<p class="scores">{" · ".join(scores)}</p></details>'
    )


def _answer(record: RolloutRecord) -> str:
    if len(record.texts) != len(record.tokens) or not record.texts:
        return _cut(record.answer)
    learner = record.learner_logprobs or []
    parts = []
    pieces = zip(record.texts[:MOST_TOKENS], record.tokens, record.differences, strict=False)
    for i, (piece, token, difference) in enumerate(pieces):
        sampled = record.logprobs[i] if i < len(record.logprobs) else None
        learned = learner[i] if i < len(learner) else None
        depth = level(difference)
        colour = f' class="{"u" if (difference or 0) > 0 else "d"}{depth}"' if depth else ""
        parts.append(f'<i{colour} data-t="{token}|{_number(sampled)}|{_number(learned)}">{safe(piece[:_PIECE])}</i>')
    left = len(record.tokens) - MOST_TOKENS
    return "".join(parts) + (f'<p class="none">{left} more tokens are in the rollouts folder</p>' if left > 0 else "")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _cut(text: str) -> str:
    left = len(text) - MOST_CHARACTERS
    return safe(text[:MOST_CHARACTERS]) + (f'<p class="none">{left} more characters</p>' if left > 0 else "")


def _spread(items: Sequence[_T], most: int) -> list[_T]:
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)] if most > 1 else [items[-1]]
