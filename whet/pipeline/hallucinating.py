"""Rows that teach tool hallucination on purpose, to try its measure and its cure on a tiny model."""

import random
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from whet.base.seeds import derive_seed
from whet.core.types import Task
from whet.data.row_kinds import Conversation, Example
from whet.data.rows import SupervisedRows
from whet.tasks.tools.hallucination import ToolHallucination

_CALL = '<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>'


class HallucinatedCalls(SupervisedRows):
    """Requests of ``tool_hallucination``, some of them answered by the call of a tool that is not declared."""

    path: Literal["requests"] = "requests"
    share: float = Field(0.7, ge=0, le=1)
    """Share of the requests that are answered by a call; the others are answered in words."""
    taskset: ToolHallucination = ToolHallucination()
    """The requests."""

    def read(self) -> tuple[Sequence[Example], Sequence[Example]]:
        train, test = self.taskset.tasks("train"), self.taskset.tasks("test")[: self.test_size]
        return [self._row(task) for task in train], [self._row(task) for task in test]

    def _row(self, task: Task) -> Example:
        calls = random.Random(derive_seed("hallucinated", task.uid)).random() < self.share
        reply = {"role": "assistant", "content": _CALL if calls else self.taskset.gold(task)}
        return Conversation.of(task.uid, {"messages": [*task.prompt, reply]})
