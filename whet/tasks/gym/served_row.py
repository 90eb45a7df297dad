"""Rows that NeMo Gym's servers grade, in their two forms:

flat            ``responses_create_params``, ``agent_ref`` and the fields of the grader, side by side
materialized    ``task_id`` with a ``taskset``, and ``task_input`` with ``responses_create_params`` (since Gym 0.7)
"""

from dataclasses import dataclass
from typing import Annotated

from whet.base.errors import DataError
from whet.base.strict_json import JsonObject
from whet.core.types import Message, Task
from whet.data.messages import read_by
from whet.data.row import missing
from whet.tasks.gym.rows import GymRow, messages_of_parameters


def _input_of(value: object) -> list[Message]:
    return messages_of_parameters(value.get("responses_create_params") if isinstance(value, dict) else None)


class WrittenRow(GymRow):
    """A row in either form."""

    task_input: Annotated[list[Message], read_by(_input_of)] | None = None

    def task(self) -> "Task[ServedRow]":
        """Return the task without a uid. Raises ``DataError`` if the row names no conversation."""
        given = self.given
        materialized = self.task_input is not None
        conversation = self.task_input if materialized else self.conversation
        if conversation is None:
            raise DataError(f"{self.where}: {missing('responses_create_params', self.model_fields_set)}")
        task_id, reference = given.get("task_id"), given.get("agent_ref")
        if materialized and not (isinstance(task_id, dict) and isinstance(task_id.get("taskset"), str)):
            raise DataError(
                f"{self.where}: field 'task_id' must be an object with a taskset, as the row has task_input"
            )
        if reference is not None and not (isinstance(reference, dict) and isinstance(reference.get("name"), str)):
            raise DataError(f"{self.where}: field 'agent_ref' must be an object with the name of an agent")
        return Task("", conversation, ServedRow(given, self.where))


@dataclass(frozen=True, slots=True)
class ServedRow:
    """A row, with the parts that the servers of Gym are sent."""

    row: JsonObject
    where: str  # file and line

    @property
    def materialized(self) -> bool:
        return "task_input" in self.row

    @property
    def player(self) -> str:
        """The name of the agent, or of the taskset, by which Gym routes the row; empty if it has none."""
        name: str = (
            self.row["task_id"]["taskset"] if self.materialized else (self.row.get("agent_ref") or {}).get("name", "")
        )
        return name

    @property
    def parameters(self) -> JsonObject:
        """The request for the model: the conversation and the tools."""
        parameters: JsonObject = (self.row["task_input"] if self.materialized else self.row)["responses_create_params"]
        return parameters

    @property
    def fields(self) -> JsonObject:
        """The fields of the grader, which ``task_input`` may hold in ``task_data``."""
        if not self.materialized:
            return self.row
        rest = {name: value for name, value in self.row["task_input"].items() if name != "responses_create_params"}
        return {**rest.pop("task_data", {}), **rest}

    @property
    def tools(self) -> list[JsonObject]:
        return self.parameters.get("tools") or []
