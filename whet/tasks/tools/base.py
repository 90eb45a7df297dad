"""Tasks that are solved by calling tools: their base classes, and their episode.

    reply with calls ──► Toolbox.answer ──► results, and the episode continues
    reply without    ──► ToolTasks.score of the final answer and of the final state

The errors of tools are results for the model; see ``whet/tools/toolbox.py``.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Generic

from whet.base.errors import ConfigError
from whet.base.extras import require
from whet.chat.calls import checked_call
from whet.config import Component
from whet.core.content import text_of
from whet.core.types import D, Message, Task
from whet.processes.user_code import place_of
from whet.tasks.base import Environment, Environments, Observation, Step, TaskSet, called
from whet.tasks.cases import Case, unearned
from whet.tasks.episodes import checked_scores
from whet.tasks.prompts import Example, messages
from whet.tasks.splits import DrawnTasks, Split, draw_splits, question_key
from whet.tools.source import TOOL_SOURCES, ToolServer, ToolSource
from whet.tools.tool import tools_of
from whet.tools.toolbox import COUNTS, Toolbox, ToolLimits


class ToolTasks(TaskSet[D], Generic[D], ABC):
    """Base of task sets whose episodes call tools. Subclasses define ``tasks``, ``state`` and ``score``, and ``gold``
    if they know a solution."""

    calls_tools: ClassVar[bool] = True

    system: str | None = None
    """The system message of tasks whose prompt begins with none."""
    limits: ToolLimits = ToolLimits()
    tools: tuple[Annotated[ToolSource, Component(TOOL_SOURCES)], ...] = ()
    """Further tools: ``{type: functions, path: my_tools:lookup}``, ``{type: mcp, command: [my-server]}``."""

    @abstractmethod
    def state(self, task: Task[D]) -> object:
        """Return the tools of a fresh episode: functions, or an object whose public methods are the tools. May be
        ``async``, as ``score`` and ``end``."""

    @abstractmethod
    def score(self, task: Task[D], state: Any, answer: str) -> dict[str, float] | Awaitable[dict[str, float]]:
        """Return the scores of an episode, with ``"reward"`` among them. ``answer`` is the text of the last reply,
        which called no tool; ``state`` is the object from ``self.state`` after all calls."""

    def end(self, state: Any) -> Awaitable[None] | None:
        """Release what ``state`` holds, at the end of an episode. By default nothing."""
        return None

    def make(self, task: Task[D]) -> Environment:
        return ToolEpisode(self, task)

    def open(self) -> Environments[D]:
        require("tools", "a task set with tools", "docstring_parser")
        return ToolEnvironments(self) if self.tools else self

    def cases(self) -> Sequence[Case]:
        tasks = self.tasks("train")[:8]
        nothing = [Case("says nothing and does nothing", task, "", 0.0, "bad") for task in tasks]
        first = self._final_text(tasks[0])
        others = [text for task in tasks[1:4] if (text := self._final_text(task)) and text != first]
        return [*nothing, *unearned(tasks[0], self.gold(tasks[0]), others)]

    @property
    def score_names(self) -> Collection[str]:
        """Return the declared scores and the counts of calls."""
        return [*self.named_scores, *(f"tool_{name}" for name in (*COUNTS, "malformed"))] if self.named_scores else ()

    def _final_text(self, task: Task[D]) -> str:
        """Return the text of the last reply of the right answer; empty without one."""
        gold = self.gold(task)
        return gold if isinstance(gold, str) else text_of(gold[-1]["content"]) if gold else ""


class ToolEnvironments(Environments):
    """A task set with further tools, whose servers start with the first episode."""

    def __init__(self, tasks: ToolTasks) -> None:
        self.tasks, self.servers = tasks, [source.open() for source in tasks.tools]

    def make(self, task: Task) -> Environment:
        return ToolEpisode(self.tasks, task, self.servers)

    async def close(self) -> None:
        for server in self.servers:
            await server.close()


class ToolEpisode(Environment):
    """An episode of a task that is solved by calling tools."""

    def __init__(self, tasks: ToolTasks, task: Task, servers: Sequence[ToolServer] = ()) -> None:
        self.tasks, self.task, self.servers = tasks, task, servers
        self.malformed = 0  # replies with a call that can't be parsed
        self.state: object = None

    async def start(self) -> Observation:
        self.state = await called(self.tasks.state, self.task)
        served = [tool for server in self.servers for tool in await server.tools()]
        tools = [*tools_of(self.state), *served]
        if not tools:
            where = place_of(type(self.tasks), "state")
            raise ConfigError(
                f"{where} returned {self.state!r:.80}, which has no tool: return a function, a list of functions, or "
                "an object with public methods"
            )
        self.toolbox = Toolbox(tools, self.tasks.limits)
        prompt = self.task.prompt
        if self.tasks.system is not None and [each["role"] for each in prompt[:1]] != ["system"]:
            prompt = messages(self.tasks.system, "")[:1] + prompt
        return Observation(list(prompt), self.toolbox.schemas)

    async def step(self, reply: Message) -> Step:
        calls, wrong = reply.get("tool_calls", []), reply.get("malformed_calls", [])
        self.malformed += bool(wrong)
        if self.malformed > self.tasks.limits.max_malformed:
            return Step(0.0, scores={"correct": 0.0} | self.counts())
        if not calls and not wrong:
            return await self.answered(text_of(reply["content"]))
        results = await self.toolbox.answer(calls)
        results += [
            {"role": "tool", "name": "unreadable", "tool_call_id": "", "content": f"Error: a call can't be read: {why}"}
            for why in wrong
        ]
        return Step(done=False, messages=results, scores=self.counts())

    async def answered(self, reply: str) -> Step:
        """Return the step after a reply that calls no tool: by default the scores of the final state."""
        scores = checked_scores(await called(self.tasks.score, self.task, self.state, reply), self.task, self.tasks)
        return Step(scores.pop("reward"), scores=scores | self.counts())

    async def close(self) -> None:
        if self.state is not None:
            await called(self.tasks.end, self.state)

    def counts(self) -> dict[str, float]:
        """Return the numbers of calls so far, as scores."""
        counts = {f"tool_{name}": float(count) for name, count in self.toolbox.counts.items()}
        return counts | {"tool_malformed": float(self.malformed)}


class SeededToolTasks(DrawnTasks[D], ToolTasks[D], Generic[D], ABC):
    """Base of tool tasks that are drawn from a seed."""

    examples: tuple[Example, ...] = ()
    """Messages of the user or a tool with replies to them, which come before each task as earlier turns."""

    @abstractmethod
    def draw(self, rng: random.Random) -> tuple[str, D]:
        """Return a question, and the data for solving and grading it (``Task.data``)."""

    def splits(self) -> dict[Split, list[Task[D]]]:
        """Return the tasks of both splits. Raises ``ConfigError`` if the settings allow too few different tasks."""
        name = type(self).__name__.lower()
        drawn = draw_splits(name, self.seed, self.sizes, self.draw, _key, "variety")
        return {
            split: [
                Task(f"{name}/{split}/{number}", messages(self.system, question, self.examples), data)
                for number, (_, (question, data)) in enumerate(drawn[split])
            ]
            for split in drawn
        }


def _key(drawn: tuple[str, object]) -> int:
    question, data = drawn
    return question_key(f"{question} {data}")


def solution(*calls: tuple[str, Mapping[str, object]], answer: str) -> list[Message]:
    """Return replies that each make one of the calls, and a last reply with the answer."""
    replies: list[Message] = [
        {"role": "assistant", "content": "", "tool_calls": [checked_call({"name": name, "arguments": arguments}, 0)]}
        for name, arguments in calls
    ]
    return [*replies, {"role": "assistant", "content": answer}]


def right_or_wrong(right: bool) -> dict[str, float]:
    """Return the scores of an episode that is either right or wrong."""
    return {"reward": float(right), "correct": float(right)}


def says(answer: str, expected: str) -> bool:
    """Return whether the last line of an answer is the expected text, apart from letter case, commas in numbers, bold
    type and a full stop. The line must hold nothing else, so that naming every possible answer earns nothing.

    >>> says("Let me see.\\n\\n**1,204.**", "1204"), says("1203 or 1204", "1204")
    (True, False)
    """
    last = (answer.strip().splitlines() or [""])[-1]
    plain = last.strip().strip("*").rstrip(".").replace(",", "").casefold()
    return plain == expected.replace(",", "").casefold()
