"""A user by rules, a function of its script and of the replies alone: for tests, laptops and training without a second
model."""

import re
from collections.abc import Sequence

from whet.core.types import Task
from whet.tasks.users.base import Fact, Speaker, Topic, User, Users

_QUESTION = re.compile(r"[^.!?\n]*\?")
_CONFIRMATION = re.compile(r"\b(shall|should|confirm|correct|right|proceed|go ahead|want me|like me)\b")
_MOST_CHARS = 20_000  # of a reply that the user reads


class ScriptedUser(User):
    """A user by rules."""

    def open(self) -> "ScriptedUsers":
        return ScriptedUsers()


class ScriptedUsers(Users):
    """Users by rules, who share nothing."""

    def speaker(self, task: Task, topics: Sequence[Topic]) -> "ScriptedSpeaker":
        return ScriptedSpeaker(topics)


class ScriptedSpeaker(Speaker):
    """The user of one episode. The first rule that applies decides:

    1. A reply without words: the user asks whether the policy is there, and reveals nothing.
    2. Questions for facts of the current topic, or for facts that the user has said: these facts.
    3. A fact of the topic is missing: the next one.
    4. A question for confirmation, once for each topic: yes.
    5. The topic has a correction: the correction. Otherwise the next topic or, after the last one, the end.
    """

    def __init__(self, topics: Sequence[Topic]) -> None:
        self.topics, self.number = topics, 0
        self.open, self.said = list(topics[0]["facts"]), list[Fact]()  # facts of the topic to be said; facts said
        self.correction, self.confirmed = topics[0].get("correction"), False

    async def answer(self, reply: str) -> str | None:
        text = reply[:_MOST_CHARS].casefold()
        if not re.search(r"\w", text):
            return "Hello? Are you still there?"
        questions = " ".join(_QUESTION.findall(text))
        asked = [fact for fact in [*self.said, *self.open] if _asks(questions, fact)]
        if facts := asked or self.open[:1]:
            self.open = [fact for fact in self.open if fact not in facts]
            self.said += [fact for fact in facts if fact not in self.said]
            return " ".join(dict.fromkeys(fact["text"] for fact in facts))
        if not self.confirmed and _CONFIRMATION.search(questions) and "else" not in questions:
            self.confirmed = True
            return "Yes, please."
        if self.correction is not None:
            return self._correct(self.correction)
        return self._raise_next()

    def _correct(self, fact: Fact) -> str:
        self._forget([fact])
        self.said.append(fact)
        self.correction, self.confirmed = None, False
        return fact["text"]

    def _raise_next(self) -> str | None:
        self.number += 1
        if self.number == len(self.topics):
            return None
        topic = self.topics[self.number]
        self._forget(topic["facts"])
        self.open, self.correction, self.confirmed = list(topic["facts"]), topic.get("correction"), False
        return topic["say"]

    def _forget(self, newer: list[Fact]) -> None:
        """Remove said facts that newer facts replace: facts of the same words."""
        words = [fact["words"] for fact in newer]
        self.said = [fact for fact in self.said if fact["words"] not in words]


def _asks(questions: str, fact: Fact) -> bool:
    return any(re.search(rf"\b{re.escape(word)}\b", questions) for word in fact["words"])
