"""The rollouts of a report: a bounded sample of a run's answers, each token coloured by the difference between the
generator's and the learner's log-prob."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from jinja2 import Template
from markupsafe import Markup

from whet.metrics.rollout_file import RolloutRecord, read_rollouts, rollout_steps
from whet.show.facts import rollout_rows
from whet.show.transcript import task_data, transcript
from whet.show.view import ORDERS, ending, level, number, select, verdict

MOST_TOKENS = 1200  # per reply
MOST_CHARACTERS = 6000  # per prompt, observation, or answer without tokens
MOST_BYTES = 4_000_000  # of all rollouts together
_PIECE = 200  # characters per token

_T = TypeVar("_T")


def sample_rollouts(run_folder: Path, most: int = 60, steps: int = 10) -> list[RolloutRecord]:
    """Choose at most ``most`` rollouts from at most ``steps`` steps spread over the run, including the first and last.

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
        chosen += sample
    return chosen


def cards(records: Sequence[RolloutRecord], template: Template) -> list[Markup]:
    """Render one foldable card per rollout, up to ``MOST_BYTES`` in total; the first card is open."""
    made: list[Markup] = []
    size = 0
    for record in records:
        head, more = rollout_rows(record)
        order = {name: key(record) for name, key in ORDERS.items()}
        parts = [(part, list(_tokens(record, part.tokens or range(0)))) for part in transcript(record)]
        card = template.render(
            record=record, head=head, more=more, order=order, parts=parts, verdict=verdict(record),
            data=task_data(record), number=number(record), ending=ending(record), opened=not made,
            most_characters=MOST_CHARACTERS,
        )  # fmt: skip
        size += len(card.encode("utf-8", "replace"))
        if size > MOST_BYTES and made:
            break
        made.append(Markup(card))  # the template has escaped it
    return made


def _tokens(record: RolloutRecord, places: range) -> Iterator[tuple[str, str, str]]:
    """Yield (colour, "id|sampler|learner", text) of the first tokens; colours are classes of the style sheet."""
    learner, differences = record.learner_logprobs or [], record.differences
    for i in places[:MOST_TOKENS]:
        piece, token, difference = record.texts[i], record.tokens[i], differences[i]
        logprobs = [_number(values[i]) if i < len(values) else "" for values in (record.logprobs, learner)]
        depth = level(difference)
        colour = f"{'u' if (difference or 0) > 0 else 'd'}{depth}" if depth else ""
        yield colour, "|".join([str(token), *logprobs]), piece[:_PIECE]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _spread(items: Sequence[_T], most: int) -> list[_T]:
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)] if most > 1 else [items[-1]]
