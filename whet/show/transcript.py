"""A rollout as a sequence of things said: the prompt, each reply with its tokens, and what was said between them."""

from collections.abc import Iterator
from dataclasses import dataclass

from whet.metrics.rollout_file import RolloutRecord
from whet.show.facts import show


@dataclass(slots=True, frozen=True)
class Part:
    """One thing said: by the model, then ``tokens`` are its places in the record's lists, or by somebody else."""

    label: str
    text: str = ""
    tokens: range | None = None
    facts: str = ""  # reward and weights of a reply


def transcript(record: RolloutRecord) -> Iterator[Part]:
    """Yield the parts in order. A rollout of one reply has two: prompt and answer."""
    known = len(record.texts) == len(record.tokens) and bool(record.texts)
    replies = [i for i, message in enumerate(record.messages) if message["role"] == "assistant"]
    sampled = replies[len(replies) - len(record.turns) :]
    if not known or len(sampled) < max(2 - record.branch, 1) or len(sampled) != len(record.turns):
        yield Part("prompt", record.prompt)
        yield Part("answer", record.answer, range(len(record.tokens)) if known else None)
        return
    turns, start = dict(zip(sampled, record.turns, strict=True)), 0
    for index, message in enumerate(record.messages):
        if turn := turns.get(index):
            facts = [f"reward {show(turn.reward)}"] if turn.reward else []
            facts += [f"weights {' to '.join(map(str, sorted(set(turn.versions))))}"] if turn.versions else []
            yield Part("assistant", message["content"], range(start, start + turn.tokens), "   ".join(facts))
            start += turn.tokens
        else:
            name = message.get("name")
            yield Part(f"{message['role']} {name}" if name else message["role"], message["content"])
