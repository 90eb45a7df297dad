"""The tasks of Nemotron 3 Nano's RL (nvidia/Nemotron-3-Nano-RL-Training-Blend) in rows of NeMo Gym. Its rows from
DAPO-Math-17k and Skywork-OR1 are placeholders: the number of a row there, and what surrounds the question.

    {"dataset": ..., "_hf_placeholder": {"row": 7, "question_template": {"prefix": ..., "suffix": ...}}}
"""

from functools import cache
from typing import Any

from whet.base.errors import ConfigError, DataError
from whet.base.strict_json import JsonObject
from whet.core.types import Message
from whet.data.row import placed_rows
from whet.data.row_kinds import Example, Prompt
from whet.data.rows import PromptRows
from whet.tasks.gym.items import template_tools
from whet.tasks.gym.rows import GymRow
from whet.tasks.math.dataset import MathRow

_PLACEHOLDER = "_hf_placeholder"
_SETTINGS = {"nano_v3_sft_profiled_dapo17k": "dapo", "nano_v3_sft_profiled_skywork_no_omni": "skywork"}

Problem = tuple[str, str]  # question, answer


class GymPrompt(Prompt):
    """A row of NeMo Gym. All columns are kept."""

    fields = ("responses_create_params",)
    compared = ("responses_create_params", "expected_answer")

    system: Any = None  # a column like others, as is the prompt: the question is in responses_create_params
    prompt: Any = None
    responses_create_params: JsonObject

    @property
    def question(self) -> list[Message]:
        params = {"responses_create_params": self.responses_create_params}
        return GymRow.of(self.where, params).conversation or []

    @property
    def declared(self) -> list[dict[str, object]] | None:
        return template_tools(self.responses_create_params.get("tools") or [])


class NemotronBlend(PromptRows):
    """Rows of the blend, with the questions and answers that its placeholders stand for."""

    kind = GymPrompt
    path: str = "hf:nvidia/Nemotron-3-Nano-RL-Training-Blend:train"
    dapo: str = "hf:BytedTsinghua-SIA/DAPO-Math-17k:train"
    """The published rows of DAPO-Math-17k: the data set on the Hub, or its files."""
    skywork: str = "hf:Skywork/Skywork-OR1-RL-Data:math"
    """The published rows of Skywork-OR1, split ``math``."""

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path, self.dapo, self.skywork)

    def row(self, where: str, values: JsonObject, as_texts: bool = False) -> Example:
        row = super().row(where, self._resolved(where, values), as_texts)
        assert row.question  # raises DataError for a conversation that is not one
        return row

    def _resolved(self, where: str, values: JsonObject) -> JsonObject:
        fields = {name: value for name, value in values.items() if name != _PLACEHOLDER}
        placeholder = values.get(_PLACEHOLDER)
        if placeholder is None:
            return fields
        setting = _SETTINGS.get(str(values.get("dataset")))
        if setting is None or not isinstance(placeholder, dict):
            raise DataError(
                f"{where}: field {_PLACEHOLDER!r} must be an object, in a row whose 'dataset' is one of: "
                f"{', '.join(_SETTINGS)}"
            )
        path, number = str(self.value_of(setting)), placeholder.get("row")
        problems = _problems(path, setting)
        if not isinstance(number, int) or not 0 <= number < len(problems):
            raise DataError(f"{where}: {path} ({setting}) has {len(problems)} rows, and none has the number {number!r}")
        problem = problems[number]
        if problem is None:
            raise DataError(f"{where}: row {number} of {path} ({setting}) has no question with one answer")
        question = _surrounded(problem[0], placeholder.get("question_template"), where)
        params = fields.get("responses_create_params") or {}
        asked = {"input": [{"role": "user", "content": question}]}
        return fields | {"question": question, "expected_answer": problem[1], "responses_create_params": params | asked}


@cache
def _problems(path: str, setting: str) -> list[Problem | None]:
    """Return the problems of a published set in its order; None for a row that is not one. The rows repeat. Raises
    ``ConfigError`` for a set that can't be read, since then no row can be resolved."""
    problems, distinct = list[Problem | None](), dict[Problem, Problem]()
    try:
        for placed in placed_rows(path):
            try:
                row = MathRow.of(*placed)
            except DataError:
                problems.append(None)
                continue
            problem = row.problem, row.answer or ""
            problems.append(distinct.setdefault(problem, problem) if row.answer else None)
    except DataError as error:
        raise ConfigError(f"{setting} = {path}, to which rows of the blend refer: {error}") from error
    return problems


def _surrounded(question: str, template: object, where: str) -> str:
    """Return the question with the text that the blend puts around it."""
    if template is None:
        return question
    if isinstance(template, dict):
        return f"{template.get('prefix') or ''}{question}{template.get('suffix') or ''}".rstrip("\n")
    if isinstance(template, str) and "{question}" in template:
        return template.replace("{question}", question)
    raise DataError(
        f"{where}: field '{_PLACEHOLDER}.question_template' must be a text with {{question}}, or an object of a prefix "
        "and a suffix"
    )
