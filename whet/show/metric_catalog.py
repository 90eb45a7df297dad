"""The metrics that are displayed: their labels, number formats, and the bounds that trigger a warning. Shared by the
terminal, the report and docs/metrics.md, so that each metric has one name."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from whet.base.strict_json import JsonObject

Style = Literal["number", "percent", "count"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One metric. A value below ``low`` or above ``high`` is shown as a warning. ``held_out`` is the key of the same
    metric on held-out tasks or rows. The metric is not drawn while no value is above ``silent``."""

    key: str
    label: str
    short: str = ""  # at most nine characters; the label where it is short
    style: Style = "number"
    low: float | None = None
    high: float | None = None
    plotted: bool = True
    held_out: str = ""
    silent: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "short", self.short or self.label)

    def worrying(self, value: float | None) -> bool:
        """Return True for a value outside the bounds, or a missing one, which was not finite."""
        if value is None or not math.isfinite(value):
            return True
        return (self.low is not None and value < self.low) or (self.high is not None and value > self.high)

    def text(self, value: float | None) -> str:
        return show(value, self.style)


# In order of interest: a small display shows the first entries that the run reports.
CATALOG = (
    Entry("reward/mean", "reward"),
    Entry("accuracy", "accuracy", style="percent", held_out="evaluation/accuracy"),
    Entry("preference/accuracy", "preference accuracy", "pref. acc", "percent", held_out="evaluation/accuracy"),
    Entry("loss", "loss", held_out="evaluation/loss"),
    Entry("preference/margin", "margin", held_out="evaluation/margin"),
    Entry("preference/chosen_reward", "reward of the chosen", "chosen"),
    Entry("preference/rejected_reward", "reward of the rejected", "rejected"),
    Entry("preference/desirable_reward", "reward of good rows", "good rows"),
    Entry("preference/undesirable_reward", "reward of bad rows", "bad rows"),
    Entry("distillation/forward_kl", "forward KL to teacher", "fwd. KL"),
    Entry("distillation/reverse_kl", "reverse KL to teacher", "rev. KL"),
    Entry("answer/length_mean", "answer length", "length", "count"),
    Entry("entropy/approximate", "entropy", low=0.03),
    Entry("entropy", "exact entropy", "exact ent", low=0.03, plotted=False),
    Entry("kl", "KL to reference", "KL", high=0.5),
    Entry("mismatch/token_mult_prob_error", "mismatch", high=1.05, silent=1.001),
    Entry("clip/high", "clipped high", "clip high", "percent", high=0.2, silent=0.0),
    Entry("clip/low", "clipped low", "clip low", "percent", high=0.2, silent=0.0),
    Entry("gradient_norm", "gradient norm", "grad norm", high=100.0),
    Entry("answer/truncated", "truncated answers", "truncated", "percent", high=0.25, silent=0.0),
    Entry("mismatch/kl", "mismatch KL", "mism. KL", high=0.02, silent=1e-4),
    Entry("mismatch/max", "largest mismatch", "mism. max", high=2.0, silent=0.01),
    Entry("ratio/mean", "ratio", low=0.9, high=1.1, plotted=False),
    Entry("reward/std", "reward spread", "spread", low=1e-6, plotted=False),
    Entry("groups/kept", "groups kept", "kept", "count", plotted=False),
    Entry("groups/dropped", "groups dropped", "dropped", "count", plotted=False),
    Entry("tokens/goodput", "tokens trained of those sampled", "goodput", "percent", plotted=False),
    Entry("idle/generator", "generator idle", "gen. idle", "percent", plotted=False),
    Entry("idle/learner", "learner waiting", "waiting", "percent", plotted=False),
    Entry("time/learner/mfu", "model FLOPs utilization", "MFU", "percent", plotted=False),
    Entry("lr", "learning rate", "lr"),
)
ENTRIES = {entry.key: entry for entry in CATALOG}
_OF_POLICIES = ("loss", "entropy/approximate", "kl", "gradient_norm")  # metrics of further policies that are drawn


def drawn(values: Mapping[str, Sequence[float]]) -> list[Entry]:
    """Return the entries that have values to draw, given all values by key. Held-out values without training values
    are drawn under the first matching entry."""

    def has(entry: Entry) -> bool:
        if recorded := values.get(entry.key):
            return entry.silent is None or max(recorded) > entry.silent
        same = [other for other in CATALOG if other.held_out and other.held_out == entry.held_out]
        others = any(values.get(other.key) for other in same)
        return bool(values.get(entry.held_out)) and not others and entry is same[0]

    return [entry for entry in CATALOG if entry.plotted and has(entry)]


def environments(values: Mapping[str, object]) -> list[Entry]:
    """Return an entry for the reward of each environment of a blend in ``values``."""
    names = [key.split("/")[1] for key in values if key.startswith("env/") and key.endswith("/reward")]
    return [Entry(f"env/{name}/reward", name, name[:9]) for name in names]


def of_roles(names: Iterable[str]) -> list[Entry]:
    """Return an entry for the reward of each role among the names of metrics, and the entries of further policies."""
    entries = []
    for name in names:
        first, _, rest = name.partition("/")
        owner, _, key = rest.partition("/")
        if first == "role" and key == "reward":
            entries.append(Entry(name, f"reward of {owner}"))
        elif first == "policies" and key in _OF_POLICIES:
            entry = ENTRIES[key]
            entries.append(replace(entry, key=name, label=f"{entry.label} of {owner}", short="", held_out=""))
    return entries


def scores(lines: Iterable[JsonObject]) -> list[Entry]:
    """Return an entry for each named score of the environment whose values differ, without the scores that the catalog
    shows as reward and accuracy."""
    values: dict[str, set[Any]] = {}
    for line in lines:
        for key in line:
            if key.startswith("scores/"):
                values.setdefault(key, set()).add(line[key])
    shown = {"scores/correct", "scores/reward"}
    return [Entry(key, key.removeprefix("scores/")) for key in sorted(values.keys() - shown) if len(values[key]) > 1]


# The displayed phases of a step (see whet/metrics/clock.py); all other time is "other". These colours are for the
# terminal; assets/page.css has the page's.
PHASES = {
    "generate": "#5b9cf5",
    "grade": "#e8b04b",
    "score": "#6fc3df",
    "learn": "#a98bf0",
    "publish": "#4fc3a1",
    "evaluate": "#f08bb4",
    "checkpoint": "#c0a58a",
    "other": "#6b7280",
}


def phases(line: JsonObject) -> dict[str, float]:
    """Return the seconds per phase of one train line; they sum to ``time/step``. Phases without time are omitted."""
    measured = {name: float(line.get(f"time/{name}") or 0.0) for name in PHASES if name != "other"}
    rest = float(line.get("time/step") or 0.0) - sum(measured.values())
    return {name: seconds for name, seconds in {**measured, "other": rest}.items() if seconds > 1e-9}


def show(value: float | None, style: Style = "number") -> str:
    """Format a number in at most seven characters.

    >>> show(0.01234), show(0.4321, "percent"), show(134_515_008, "count"), show(2e-6)
    ('0.0123', '43.2%', '134.5M', '2.0e-06')
    """
    if value is None or not math.isfinite(value):
        return "nan/inf"
    if style == "percent":
        return f"{100 * value:.1f}%"
    if style == "count":
        for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
            if abs(value) >= size:
                scale = 1e3 if unit == "k" else size
                return f"{value / scale:.1f}{unit}"
        return f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.1f}"
    size = abs(value)
    if size < 1e-12:  # a rounding error
        return "0"
    if size >= 1e5 or size < 1e-3:
        return f"{value:.1e}"
    return f"{value:.{max(0, 3 - int(math.log10(size)))}f}" if size >= 1 else f"{value:.3g}"


def axis_label(value: float, spread: float, style: Style = "number") -> str:
    """Format a number just precisely enough to distinguish the labels of an axis with this spread.

    >>> axis_label(1.0, 0.9), axis_label(0.5, 0.9), axis_label(0.5, 0.9, "percent")
    ('1.00', '0.50', '50%')
    """
    if style == "percent":
        return f"{100 * value:.{0 if spread > 0.1 else 1 if spread > 0.01 else 2}f}%"
    if style == "count" or not 1e-4 < spread < 1e5 or abs(value) >= 1e6:
        return show(value, style)
    digits = max(0, 1 - math.floor(math.log10(spread)))
    return f"{round(value, digits) + 0.0:.{digits}f}"  # + 0.0: no minus before a zero


def duration(seconds: float | None) -> str:
    """Format a duration for people.

    >>> duration(4.25), duration(75), duration(3725)
    ('4.2 s', '1m 15s', '1h 02m')
    """
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
