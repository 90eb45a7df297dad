"""The script of a simulated user: topics in the order in which the user raises them, with the facts that the user
knows. The policy never sees it."""

from collections.abc import Sequence
from typing import NotRequired, TypedDict


class Fact(TypedDict):
    """One fact that a user reveals when it is asked for."""

    words: list[str]  # a question with one of these words, in lower case, asks for the fact
    text: str  # the user's sentence


class Topic(TypedDict):
    """One request of a user."""

    say: str  # the sentence that raises it, without its facts
    facts: list[Fact]
    correction: NotRequired[Fact]  # said after the first reply after the last fact; replaces the fact of its words


def instructions(topics: Sequence[Topic]) -> str:
    """Return the topics as private instructions for a model that plays the user."""
    lines = list[str]()
    for number, topic in enumerate(topics, 1):
        lines.append(f"{number}. You say: {topic['say']}")
        lines += [f"   If you are asked, you say: {fact['text']}" for fact in topic["facts"]]
        if correction := topic.get("correction"):
            lines.append(f"   Once this is said to be done, you correct yourself: {correction['text']}")
    return "\n".join(lines)
