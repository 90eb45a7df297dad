"""A rollout as a sequence of parts: the prompt, each reply with its tokens, and the messages between replies."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from whet.core.content import words_of
from whet.metrics.rollout_file import RolloutRecord
from whet.show.images import shown, thumbnails
from whet.show.metric_catalog import show


@dataclass(slots=True, frozen=True)
class Part:
    """One message. For a sampled reply, ``tokens`` is its range in the record's token lists."""

    label: str
    text: str = ""
    tokens: range | None = None
    facts: str = ""  # reward and weight versions of a reply
    folded: bool = False  # before the question: instructions, examples
    images: list[str] = field(default_factory=list)  # data URLs of thumbnails


def transcript(record: RolloutRecord) -> Iterator[Part]:
    """Yield the parts in order: prompt and answer only, if the record does not have the separate replies."""
    has_texts = len(record.texts) == len(record.tokens) and bool(record.texts)
    replies = [i for i, message in enumerate(record.messages) if message["role"] == "assistant"]
    sampled = replies[len(replies) - len(record.turns) :]
    complete = has_texts if record.turns else not record.answer
    if not record.messages or not complete or len(sampled) != len(record.turns):
        yield Part("prompt", record.prompt)
        yield Part("answer", record.answer, range(len(record.tokens)) if has_texts else None)
        return
    first = sampled[0] if sampled else len(record.messages)
    asked = [i for i, message in enumerate(record.messages[:first]) if message["role"] == "user"]
    turns, start, question = dict(zip(sampled, record.turns, strict=True)), 0, asked[-1] if asked else 0
    for index, message in enumerate(record.messages):
        if turn := turns.get(index):
            facts = [f"reward {show(turn.reward)}"] if turn.reward else []
            facts += [f"weights {' to '.join(map(str, sorted(set(turn.versions))))}"] if turn.versions else []
            yield Part("assistant", words_of(message["content"]), range(start, start + turn.tokens), "   ".join(facts))
            start += turn.tokens
        else:
            name = message.get("name")
            label = f"{message['role']} {name}" if name else message["role"]
            content = message["content"]
            yield Part(label, shown(content), folded=index < question, images=thumbnails(content))


def task_data(record: RolloutRecord) -> list[tuple[str, str]]:
    """Return the task's data for graders, without texts that are in the prompt."""
    asked = {words_of(message["content"]).strip() for message in record.messages if message["role"] != "assistant"}
    return [(name, text) for name, text in record.data.items() if text and text.strip() not in asked]
