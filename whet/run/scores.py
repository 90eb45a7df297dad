"""The numbers of an evaluation: accuracy with its interval, pass@k, majority votes, and comparisons task by task."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import nan
from statistics import fmean

from whet.core.content import text_of
from whet.core.types import Episode, Task
from whet.metrics.statistics import majority_at_k, mcnemar, paired_difference, pass_at_k, wilson

Stated = Callable[[Task, str], str | None]  # see ``TaskSet.stated``


def counts(samples: int) -> list[int]:
    """Return the numbers of answers for which pass@k is reported: 1, 2, 4, ... and ``samples``."""
    return sorted({2**power for power in range(samples.bit_length())} | {samples})


def final_text(episode: Episode) -> str:
    """Return the text of an episode's last reply."""
    return next((text_of(m["content"]) for m in reversed(episode.messages) if m["role"] == "assistant"), "")


@dataclass(slots=True)
class Report:
    """The result of an evaluation. ``low`` and ``high`` bound the accuracy with 95% confidence (Wilson), over tasks."""

    n: int  # tasks
    samples: int  # answers per task
    accuracy: float
    low: float
    high: float
    reward: float
    length_mean: float  # tokens per answer
    truncated: float  # share of answers that ran into the length limit
    pass_at: dict[int, float] = field(default_factory=dict)  # unbiased pass@k
    majority_at: dict[int, float] = field(default_factory=dict)  # maj@k, of task sets whose answers can be equal
    consensus_at: dict[int, float] = field(default_factory=dict)  # cons@k: the majority also has the share of votes
    per_task: list[float] = field(default_factory=list, repr=False)  # share of right answers, in the tasks' order
    episodes: list[tuple[Task, Episode]] = field(default_factory=list, repr=False)
    sets: "dict[str, Report]" = field(default_factory=dict)  # of environments of a blend, and of additional sets

    @classmethod
    def of(
        cls, episodes: list[tuple[Task, Episode]], samples: int, stated: Stated | None = None, share: float = 0.5
    ) -> "Report":
        """Sum up ``samples`` answers to each task; the answers to a task follow each other. ``stated`` gives the final
        answer that a reply states, for majority votes; ``share`` is that of the votes for cons@k."""
        answers = [episode for _, episode in episodes]
        correct = [a.scores.get("correct", float(a.reward > 0)) >= 1 for a in answers]
        per_task = [sum(correct[i : i + samples]) for i in range(0, len(correct), samples)]
        tasks, count = len(per_task), len(answers)
        accuracy = sum(correct) / count
        low, high = wilson(accuracy * tasks, tasks)
        report = cls(
            n=tasks,
            samples=samples,
            accuracy=accuracy,
            low=low,
            high=high,
            reward=sum(a.reward for a in answers) / count,
            length_mean=sum(a.trained_tokens for a in answers) / count,
            truncated=sum(a.status == "truncated" for a in answers) / count,
            pass_at={k: sum(pass_at_k(samples, c, k) for c in per_task) / tasks for k in counts(samples)},
            per_task=[right / samples for right in per_task],
            episodes=episodes,
        )
        if samples > 1 and stated is not None:
            votes = [stated(task, final_text(episode)) for task, episode in episodes]
            by_task = [(votes[i : i + samples], correct[i : i + samples]) for i in range(0, count, samples)]
            for k in counts(samples)[1:]:
                report.majority_at[k] = fmean(majority_at_k(*task, k) for task in by_task)
                report.consensus_at[k] = fmean(majority_at_k(*task, k, share) for task in by_task)
        return report

    @classmethod
    def without_tasks(cls) -> "Report":
        """Return a report for additional sets alone. Its own numbers are NaN, and not among its metrics."""
        return cls(0, 0, accuracy=nan, low=nan, high=nan, reward=nan, length_mean=nan, truncated=nan)

    @property
    def by_sign(self) -> bool:
        """Return whether the accuracy is only the share of rewards above 0: some answers have no score ``correct``, and
        a reward other than 0 and 1."""
        episodes = (episode for _, episode in self.episodes)
        return any("correct" not in episode.scores and episode.reward not in (0, 1) for episode in episodes)

    def compare(self, other: "Report") -> dict[str, float]:
        """Return the accuracy minus that of ``other`` on the same tasks, its 95% interval (bootstrap over tasks) and,
        for one answer per task, the p-value of McNemar's exact test; and these for each set that both reports have."""
        difference, low, high = paired_difference(other.per_task, self.per_task)
        values = {"difference": difference, "difference_low": low, "difference_high": high}
        if self.samples == 1:
            values["difference_p"] = mcnemar([x == 1 for x in other.per_task], [x == 1 for x in self.per_task])
        for name in (name for name in self.sets if name in other.sets):
            compared = self.sets[name].compare(other.sets[name])
            values |= {f"{name}/{key}": value for key, value in compared.items()}
        return values

    def metrics(self) -> dict[str, float]:
        """Return the numbers of one evaluation line of the metrics."""
        values: dict[str, float] = {}
        if self.n:
            values = {
                "evaluation/accuracy": self.accuracy,
                "evaluation/n": self.n,
                "evaluation/low": self.low,
                "evaluation/high": self.high,
                "evaluation/reward": self.reward,
                "evaluation/length_mean": self.length_mean,
                "evaluation/truncated": self.truncated,
            }
        for role in dict.fromkeys(role for _, episode in self.episodes for role in episode.rewards):
            values[f"evaluation/role/{role}/reward"] = fmean(
                e.rewards[role] for _, e in self.episodes if role in e.rewards
            )
        for name, at in (("pass", self.pass_at), ("maj", self.majority_at), ("cons", self.consensus_at)):
            values |= {f"evaluation/{name}_at_{k}": value for k, value in at.items() if k > 1}
        for name, report in self.sets.items():
            values |= {key.replace("/", f"/{name}/", 1): value for key, value in report.metrics().items()}
        return values
