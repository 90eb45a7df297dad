"""Rollouts on disk: ``rollouts/step-000012.jsonl``, one line of JSON per branch.

The recorder turns trajectories into ``RolloutRecord``s, which are written here; the report and ``whet view`` read them.
Neither needs a tokenizer or a model.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Self

from pydantic_core import PydanticSerializationError, to_json, to_jsonable_python

from whet.base.errors import DataError
from whet.base.files import replacing, sync_folder
from whet.base.strict_json import JsonObject
from whet.config.typed import check_types
from whet.core.types import Message, Status
from whet.metrics.rollout_images import restoring, storing


@dataclass(slots=True)
class Turn:
    """One reply of an episode."""

    tokens: int  # number of tokens
    reward: float = 0.0
    versions: tuple[int, int] | None = None


@dataclass(slots=True)
class RolloutRecord:
    """A branch of an episode, for display. T is the number of sampled tokens, over all replies."""

    step: int
    uid: str = ""  # the group's
    task: str = ""  # the task's uid
    sample: int = 0  # index of the episode in the group
    branch: int = 0  # index in the episode; scores and status are the episode's, the reward is the role's
    role: str = ""  # of the branch, in an episode of several roles
    data: dict[str, str] = field(default_factory=dict)  # the task's data for graders, such as an expected answer
    prompt: str = ""  # the text before the first reply
    answer: str = ""  # the text of all trained spans
    messages: list[Message] = field(default_factory=list)
    tools: list[JsonObject] | None = None  # the tools in the prompt
    reward: float | None = None  # None if the status is failed
    advantage: float | None = None  # None if dropped or not yet computed
    scores: dict[str, float] = field(default_factory=dict)
    status: str = Status.COMPLETED.value
    limit: str | None = None  # the exhausted budget
    turns: list[Turn] = field(default_factory=list)
    error: str | None = None
    tokens: list[int] = field(default_factory=list)  # [T]
    texts: list[str] = field(default_factory=list)  # [T] the decoded piece of each token
    logprobs: list[float | None] = field(default_factory=list)  # [T] from the generator
    learner_logprobs: list[float | None] | None = None  # [T] under the weights at the start of the update
    versions: tuple[int, int] | None = None  # oldest and newest weights that sampled it

    @property
    def differences(self) -> list[float | None]:
        """The difference learner - generator of log-probs, [T]; None where either is missing."""
        learner = self.learner_logprobs or []
        result: list[float | None] = [
            None if a is None or b is None else b - a for a, b in zip(self.logprobs, learner, strict=False)
        ]
        return result + [None] * (len(self.tokens) - len(result))

    @property
    def mismatch(self) -> float | None:
        """The largest absolute difference over the tokens; None without any difference."""
        return max((abs(d) for d in self.differences if d is not None), default=None)

    @property
    def correct(self) -> bool | None:
        """True if the score ``correct`` says so, or, without such a score, if the reward is positive."""
        value = self.scores.get("correct", self.reward)
        return (
            None if value is None or self.status == Status.FAILED else value > (0.5 if "correct" in self.scores else 0)
        )

    @classmethod
    def from_json(cls, line: JsonObject) -> Self:
        """Read one line. Unknown keys are ignored and missing ones take their defaults, so old runs stay readable.
        Raises ``ValueError`` that names a key with a value of a wrong type."""
        names = {f.name for f in fields(cls)}
        values = {name: value for name, value in line.items() if name in names}
        if isinstance(scores := values.get("scores"), dict):
            values["scores"] = {name: value for name, value in scores.items() if value is not None}
        check_types(cls, values)
        if isinstance(values.get("versions"), list):
            values["versions"] = tuple(values["versions"])
        values["turns"] = [Turn(**turn) for turn in values.get("turns") or []]
        return cls(**values)


def rollout_path(run_folder: Path, step: int) -> Path:
    return run_folder / "rollouts" / f"step-{step:06d}.jsonl"


def rollout_steps(run_folder: Path) -> list[int]:
    """Return the steps whose rollouts were recorded, in order."""
    names = [path.stem.removeprefix("step-") for path in (run_folder / "rollouts").glob("step-*.jsonl")]
    return sorted(int(name) for name in names if name.isdigit())


def write_rollouts(run_folder: Path, step: int, records: Iterable[RolloutRecord]) -> Path:
    """Write all records of a step atomically, each after its images and before the next one is made. Non-finite numbers
    are written as null."""
    path = rollout_path(run_folder, step)
    stored = storing(path.parent)
    with replacing(path) as staging, staging.open("wb") as file:
        for record in records:
            file.write(_line(replace(record, messages=stored(record.messages))))
    return path


def _line(record: RolloutRecord) -> bytes:
    try:
        return to_json(record, inf_nan_mode="null") + b"\n"  # in an eighth of the time that ``json`` takes
    except PydanticSerializationError:  # a lone surrogate can't be encoded in UTF-8
        plain = to_jsonable_python(record, inf_nan_mode="null")
        line = json.dumps(plain, ensure_ascii=False, allow_nan=False) + "\n"
        return line.encode("utf-8", "backslashreplace")  # the escape of Python is also that of JSON


def read_rollouts(run_folder: Path, step: int) -> Iterator[RolloutRecord]:
    """Yield the records of one step. Raises DataError for a missing file or an invalid line."""
    path = rollout_path(run_folder, step)
    try:
        file = path.open("rb")
    except FileNotFoundError:
        recorded = rollout_steps(run_folder)
        have = f"it has {len(recorded)} steps from {recorded[0]} to {recorded[-1]}" if recorded else "it recorded none"
        raise DataError(f"no rollouts of step {step} in {run_folder} ({have})") from None
    restored = restoring(path.parent)
    with file:
        for number, line in enumerate(file, 1):
            try:
                record = RolloutRecord.from_json(json.loads(line))
                yield replace(record, messages=restored(record.messages))
            except (ValueError, TypeError, AttributeError) as error:
                raise DataError(f"{path}:{number}: not a rollout record: {error}") from error


def drop_rollouts_after(run_folder: Path, step: int) -> None:
    """Delete the rollouts of steps that a resumed run will repeat."""
    later = [s for s in rollout_steps(run_folder) if s > step]
    for s in later:
        rollout_path(run_folder, s).unlink()
    if later:
        sync_folder(run_folder / "rollouts")
