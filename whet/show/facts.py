"""Facts about a run as rows of (label, text), shared by the terminal, the summary, the report and ``whet view``. The
recipe is read as plain data, so that run folders of other versions can be opened.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from whet.base.escaping import escape_controls
from whet.base.strict_json import JsonObject
from whet.config import RecipeError, parse_mapping
from whet.metrics.rollout_file import RolloutRecord
from whet.metrics.statistics import newcombe, wilson
from whet.sandbox.sandbox import UNPROTECTED, is_unprotected
from whet.show.metric_catalog import duration, show

Rows = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The model, data and algorithm of a run. Empty or None if unknown from recipe and metrics."""

    name: str
    model: str = ""
    parameters: float | None = None
    trained_parameters: float | None = None
    task: str = ""
    algorithm: str = ""
    device: str = ""
    precision: str = ""
    steps: int | None = None
    sandbox: str = ""  # a warning if the sandbox is off

    @classmethod
    def of(cls, folder: Path, recipe: Mapping[str, object], values: JsonObject | None = None) -> Self:
        """Collect the facts. Metrics such as ``run/model`` take precedence: they report what was actually loaded."""
        reported = {k.removeprefix("run/"): v for k, v in (values or {}).items() if k.startswith("run/")}

        def text(name: str, *paths: str) -> str:
            return escape_controls(str(reported.get(name) or _first(recipe, *paths) or ""))

        model = text("model", "model.path", "model.name", "model")
        steps = reported.get("steps") or _first(recipe, "steps")

        def number(name: str) -> float | None:
            value = reported.get(name)
            return float(value) if isinstance(value, int | float) else None

        return cls(
            name=text("name", "name") or escape_controls(folder.resolve().name),
            model=Path(model).name or model,  # without the Hub owner or the folder, to save space
            parameters=number("parameters"),
            trained_parameters=number("trained_parameters"),
            task=text("task", "data.type", "data"),
            algorithm=text("algorithm", "algorithm.type", "algorithm"),
            device=text("device"),
            precision=text("computes_in", "learner.precision"),
            steps=int(steps) or None if isinstance(steps, int | float) else None,
            sandbox=UNPROTECTED if is_unprotected(recipe) else "",
        )

    def rows(self) -> Rows:
        """Return the non-empty facts."""
        facts = {
            "sandbox": self.sandbox, "model": self.model, "parameters": self._size(), "task": self.task,
            "algorithm": self.algorithm, "device": self.device, "precision": self.precision,
        }  # fmt: skip
        return [(name, text) for name, text in facts.items() if text]

    def line(self) -> str:
        """Return the facts in one line."""
        return " · ".join(self._size(" parameters") if name == "parameters" else text for name, text in self.rows())

    def _size(self, unit: str = "") -> str:
        if not self.parameters:
            return ""
        size, trained = show(self.parameters, "count") + unit, self.trained_parameters
        return size if trained in (None, self.parameters) else f"{size} ({show(trained, 'count')} trained)"

    def without_rates(self) -> Self:
        """Return the facts with only the first reason for the precision: how much faster it is."""
        first, semicolon, _ = self.precision.partition(";")
        return replace(self, precision=first + ")" * bool(semicolon))

    def short(self) -> str:
        """Return the facts in one line, without the reason for the precision."""
        return replace(self, precision=self.precision.partition(" (")[0]).line()


@dataclass(frozen=True, slots=True)
class Measured:
    """An accuracy over ``n`` answers with its 95% interval. If n is unknown, it is 0 and the interval is (0, 1)."""

    step: int
    accuracy: float
    n: int
    low: float
    high: float

    @classmethod
    def of(cls, line: JsonObject, name: str = "") -> Self | None:
        """Read an evaluation line, for the set ``name`` or the run's tasks, with Wilson's interval if the line has
        none. Returns None without an accuracy."""
        at = f"evaluation/{name}/" if name else "evaluation/"
        accuracy = line.get(f"{at}accuracy")
        if accuracy is None:
            return None
        n = max(0, int(line.get(f"{at}n") or 0))
        low, high = wilson(_right(accuracy, n), n)
        if line.get(f"{at}low") is not None and line.get(f"{at}high") is not None:
            low, high = line[f"{at}low"], line[f"{at}high"]
        return cls(line["step"], accuracy, n, low, high)

    @property
    def interval(self) -> str:
        return f"{100 * self.low:.1f} to {100 * self.high:.1f}%"

    def until(self, later: "Measured") -> "Change | None":
        """Return the difference of a later accuracy and this one; None if a number of answers is unknown."""
        if not (self.n and later.n):
            return None
        a, b = _right(self.accuracy, self.n), _right(later.accuracy, later.n)
        return Change(*newcombe(a, self.n, b, later.n))


@dataclass(frozen=True, slots=True)
class Change:
    """A difference of two accuracies with its 95% interval for independent tasks (wider than for paired ones)."""

    mean: float
    low: float
    high: float

    @property
    def style(self) -> str:
        """Return "up", "down", or an empty string if the difference is not significant."""
        return "up" if self.low > 0 else "down" if self.high < 0 else ""

    @property
    def points(self) -> str:
        return f"{100 * self.mean:+.1f} points"

    @property
    def interval(self) -> str:
        return f"{100 * self.low:+.1f} to {100 * self.high:+.1f}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The first evaluation and, if there are several, the last one."""

    before: Measured | None
    after: Measured | None

    @classmethod
    def of(cls, lines: Sequence[JsonObject], name: str = "") -> Self:
        """Read all evaluation lines, for the set ``name`` or for the run's tasks."""
        evaluations = [m for line in lines if line.get("kind") == "evaluation" and (m := Measured.of(line, name))]
        return cls(evaluations[0] if evaluations else None, evaluations[-1] if len(evaluations) > 1 else None)

    def change(self) -> Change | None:
        """Return the difference of the two evaluations; None if their numbers of answers are unknown."""
        return self.before.until(self.after) if self.before and self.after else None


@dataclass(frozen=True, slots=True)
class HeldOutLoss:
    """A loss over ``n`` held-out rows."""

    step: int
    loss: float
    n: int

    @classmethod
    def of(cls, lines: Sequence[JsonObject]) -> list[Self]:
        """Read the first loss of a run and, if there are several, the last one."""
        evaluations = [line for line in lines if line.get("evaluation/loss") is not None]
        ends = [*evaluations[:1], *evaluations[1:][-1:]]
        return [cls(line["step"], line["evaluation/loss"], int(line.get("evaluation/n") or 0)) for line in ends]


@dataclass(frozen=True, slots=True)
class Summary:
    """The outcome of a run so far."""

    steps: int
    seconds: float  # of all steps, with their evaluations and checkpoints
    tokens_per_second: float | None  # the median
    utilization: float | None  # the learner's model FLOPs utilization, the median
    tflops: float | None  # of a learner's device, the median
    device_hours: float | None
    cost: float | None
    whole: Outcome  # on the run's held-out tasks
    losses: list[HeldOutLoss]  # before and after, for runs that learn from rows
    sets: dict[str, Outcome]  # per environment of a blend, and per additional set

    @classmethod
    def of(cls, lines: Sequence[JsonObject]) -> Self:
        """Summarise the lines of a metrics file (see ``read_metrics``)."""
        train = [line for line in lines if line.get("kind", "train") == "train"]
        return cls(
            steps=max((line["step"] for line in train), default=0),
            seconds=sum(line.get("time/step") or 0.0 for line in train),
            tokens_per_second=_median(train, "time/tokens_per_second"),
            utilization=_median(train, "time/learner/mfu"),
            tflops=_median(train, "time/learner/tflops"),
            device_hours=_largest(train, "time/device_hours"),
            cost=_largest(train, "time/cost"),
            whole=Outcome.of(lines),
            losses=HeldOutLoss.of(lines),
            sets={name: Outcome.of(lines, name) for name in _sets(lines)},
        )

    def rows(self, steps: int | None) -> Rows:
        """Return the progress (out of ``steps``) and speed."""
        rows = [("steps", f"{self.steps} of {steps}" if steps else str(self.steps))]
        if self.seconds:
            rows.append(("training time", duration(self.seconds)))
        if self.tokens_per_second:
            rows.append(("tokens per second", f"{show(self.tokens_per_second, 'count')} (median)"))
        if self.tflops:
            share = f", {show(self.utilization, 'percent')} of the peak" if self.utilization else ""
            rows.append(("learner", f"{show(self.tflops)} TFLOP/s{share} (median)"))
        if self.device_hours:
            price = f", cost {self.cost:,.2f}" if self.cost is not None else ""
            rows.append(("device-hours", f"{self.device_hours:,.2f}{price}"))
        return rows


def rollout_rows(record: RolloutRecord) -> tuple[Rows, Rows]:
    """Return the facts for an answer's headline, and the further facts below it."""
    head = [("reward", show(record.reward))] if record.reward is not None else []
    if record.advantage is not None:
        head.append(("advantage", f"{record.advantage:+.2f}"))
    if record.role:
        head.append(("role", record.role))
    head.append(("tokens", str(len(record.tokens))))
    more = [(name, show(value)) for name, value in record.scores.items()]
    if record.versions:
        more.append(("weights", " to ".join(str(version) for version in sorted(set(record.versions)))))
    if record.mismatch is not None:
        more.append(("largest disagreement", show(record.mismatch)))
    return head, more


def _right(accuracy: float, n: int) -> float:
    """Return the number of right answers, which a changed file can't make impossible."""
    return min(n, max(0.0, accuracy * n))


def _median(lines: Sequence[JsonObject], key: str) -> float | None:
    values = sorted(line[key] for line in lines if line.get(key))
    return values[len(values) // 2] if values else None


def _largest(lines: Sequence[JsonObject], key: str) -> float | None:
    return max((line[key] for line in lines if line.get(key) is not None), default=None)


def _sets(lines: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the names in the keys ``evaluation/NAME/accuracy``."""
    keys = dict.fromkeys(key for line in lines for key in line if key.startswith("evaluation/"))
    return [key.split("/")[1] for key in keys if key.count("/") == 2 and key.endswith("/accuracy")]


def read_recipe(run_folder: Path) -> tuple[str, Mapping[str, object]]:
    """Return the text of a run's recipe and its settings as plain data; empty where it is missing or damaged."""
    path = run_folder / "recipe.yaml"
    text = path.read_text("utf-8", "replace") if path.exists() else ""
    try:
        return text, parse_mapping(text, path.name)
    except RecipeError:
        return text, {}


def _first(recipe: Mapping[str, object], *paths: str) -> object:
    """Return the value at the first dotted path that leads to a string or number."""
    for path in paths:
        here: Any = recipe
        for key in path.split("."):
            here = here.get(key) if isinstance(here, Mapping) else None
        if isinstance(here, str | int | float) and here != "":
            return here
    return None
