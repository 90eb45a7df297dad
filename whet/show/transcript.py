"""A rollout as a sequence of things said: the prompt, each reply with its tokens, and what was said between them."""

from collections.abc import Iterator
from dataclasses import dataclass

from whet.metrics.rollout_file import RolloutRecord
from whet.show.metric_catalog import show


@dataclass(slots=True, frozen=True)
class Part:
    """One thing said: by the model, then ``tokens`` are its places in the record's lists, or by somebody else."""

    label: str
    text: str = ""
    tokens: range | None = None
    facts: str = ""  # reward and weights of a reply
    folded: bool = False  # it stands before the question: instructions, examples


def transcript(record: RolloutRecord) -> Iterator[Part]:
    """Yield the parts in order. A record without its replies one by one has two, prompt and answer."""
    known = len(record.texts) == len(record.tokens) and bool(record.texts)
    replies = [i for i, message in enumerate(record.messages) if message["role"] == "assistant"]
    sampled = replies[len(replies) - len(record.turns) :]
    whole = known if record.turns else not record.answer
    if not record.messages or not whole or len(sampled) != len(record.turns):
        yield Part("prompt", record.prompt)
        yield Part("answer", record.answer, range(len(record.tokens)) if known else None)
        return
    first = sampled[0] if sampled else len(record.messages)
    asked = [i for i, message in enumerate(record.messages[:first]) if message["role"] == "user"]
    turns, start, question = dict(zip(sampled, record.turns, strict=True)), 0, asked[-1] if asked else 0
    for index, message in enumerate(record.messages):
        if turn := turns.get(index):
            facts = [f"reward {show(turn.reward)}"] if turn.reward else []
            facts += [f"weights {' to '.join(map(str, sorted(set(turn.versions))))}"] if turn.versions else []
            yield Part("assistant", message["content"], range(start, start + turn.tokens), "   ".join(facts))
            start += turn.tokens
        else:
            name = message.get("name")
            label = f"{message['role']} {name}" if name else message["role"]
            yield Part(label, message["content"], folded=index < question)


def task_data(record: RolloutRecord) -> list[tuple[str, str]]:
    """Return what graders were told of the task, without what the prompt says anyway."""
    said = {message["content"].strip() for message in record.messages if message["role"] != "assistant"}
    return [(name, text) for name, text in record.data.items() if text and text.strip() not in said]
