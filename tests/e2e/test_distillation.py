"""Whole runs that learn from a teacher, with tiny models: the student comes closer to it, by every form of the
objective and across tokenizers, and a killed run resumes exactly."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_learning import lines
from tests.e2e.test_resume import killed_and_resumed, metrics
from tests.forks import whet
from tests.other_tokenizers import bpe_tokenizer, save_with
from tests.rows import rows_recipe, texts, write_rows
from tests.toy import Lowercase, toy_recipe, write_recipe
from whet.base.errors import ConfigError, WhetError
from whet.checkpoint.export import export
from whet.config import load
from whet.core.types import Task
from whet.run import run
from whet.run.recipe import Recipe

NOT_SAVED = {"checkpoints": {"every": 0}, "evaluation": {"enabled": False}}


class TwoSubjects(Lowercase):
    """Each task says who teaches it."""

    def tasks(self, split: str) -> Sequence[Task]:
        tasks = super().tasks(split)
        for index, task in enumerate(tasks):
            task.data["subject"] = ("letters", "words")[index % 2]
        return tasks


@pytest.fixture(scope="module")
def teacher(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of a run that has learned the toy task."""
    folder = tmp_path_factory.mktemp("teacher")
    run.start(toy_recipe(tiny_model, steps=40, checkpoints={"every": 0}, evaluation={"enabled": False}), folder / "run")
    export(folder / "run", folder / "exported")
    return folder / "exported"


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with other tokens."""
    return save_with(tmp_path_factory.mktemp("stranger"), bpe_tokenizer(), seed=8, initializer_range=0.3)


def on_policy(student: Path, teacher: Path, steps: int, algorithm: dict[str, Any], **changes: Any) -> Recipe:
    given = {"type": "on_policy_distillation", "group_size": 4, "teachers": {"tutor": {"path": str(teacher)}}}
    return toy_recipe(student, steps=steps, algorithm={**given, **algorithm}, **{**NOT_SAVED, **changes})


def means(folder: Path, name: str, count: int = 3) -> tuple[float, float]:
    """Over the first and over the last steps."""
    values = [line[name] for line in lines(folder, "train")[1:]]
    return sum(values[:count]) / count, sum(values[-count:]) / count


@pytest.mark.parametrize(
    ("algorithm", "metric", "falls_to"),
    [
        ({"loss": "on_policy_distillation"}, "distillation/reverse_kl", 0.9),
        *(
            pytest.param(*setting, marks=pytest.mark.slow)
            for setting in [
                ({}, "distillation/forward_kl", 0.7),
                (
                    {"loss": {"type": "distillation", "divergence": "reverse", "tail": "bucket"}},
                    "distillation/reverse_kl",
                    0.7,
                ),
                ({"loss": {"type": "distillation", "divergence": "jsd"}, "k": 1000}, "loss", 0.7),
                (
                    {"loss": "policy", "advantage": "teacher", "minibatches": 3, "epochs": 2},
                    "distillation/reverse_kl",
                    0.9,
                ),
            ]
        ),
    ],
    ids=["sampled", "forward", "reverse", "jsd", "advantage"],
)
def test_the_student_comes_closer_to_its_teacher(
    tiny_model: Path, teacher: Path, tmp_path: Path, algorithm: dict[str, Any], metric: str, falls_to: float
) -> None:
    folder = run.start(on_policy(tiny_model, teacher, 25, algorithm), tmp_path / "run")
    first, last = means(folder, metric)
    assert 0 < last < falls_to * first
    first, last = means(folder, "reward/mean")
    assert last > first + 0.2, "what the teacher is good at, the student learns without a look at the reward"


def test_a_teacher_with_other_tokens_is_learned_from(tiny_model: Path, stranger: Path, tmp_path: Path) -> None:
    folder = run.start(on_policy(tiny_model, stranger, 2, {"loss": "on_policy_distillation"}), tmp_path / "run")
    assert all(line["gradient_norm"] > 0 < line["distillation/reverse_kl"] for line in lines(folder, "train")[1:])
    assert "has other tokens than the student" in (folder / "log.txt").read_text()


@pytest.mark.slow
def test_the_student_comes_closer_to_a_teacher_with_other_tokens(
    tiny_model: Path, stranger: Path, tmp_path: Path
) -> None:
    algorithm = {"loss": "on_policy_distillation", "group_size": 8}
    changes = {"data": {"type": "tests.toy:Lowercase", "size": 4}, "optimizer": {"lr": 5e-3}}
    folder = run.start(on_policy(tiny_model, stranger, 30, algorithm, **changes), tmp_path / "run")
    first, last = means(folder, "distillation/reverse_kl", 5)
    assert last < first - 0.3


def test_two_teachers_teach_their_own_tasks_or_all_of_them_together(
    tiny_model: Path, teacher: Path, tmp_path: Path
) -> None:
    teachers = {"letters": {"path": str(teacher)}, "words": {"path": str(tiny_model), "weight": 2.0}}
    data = {"type": "tests.e2e.test_distillation:TwoSubjects"}
    for name, more in (("routed", {"route_by": "subject"}), ("mixed", {"k": 8})):
        recipe = on_policy(tiny_model, teacher, 2, {"teachers": teachers, **more}, data=data)
        trained = lines(run.start(recipe, tmp_path / name), "train")[1:]
        assert [line["learner/skipped"] for line in trained] == [0, 0]
        assert all(line["distillation/forward_kl"] > 0 for line in trained)


def test_given_replies_teach_the_teachers_distribution_and_rows_are_held_out(
    tiny_model: Path, teacher: Path, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [row | {"by": "tutor"} for row in texts(40)])
    algorithm = {"type": "distillation", "teachers": {"tutor": {"path": str(teacher)}}, "route_by": "by"}
    recipe = rows_recipe(tiny_model, "supervised", path, algorithm, steps=20, checkpoints={"every": 0})
    folder = run.start(recipe, tmp_path / "run")
    before, after = lines(folder, "evaluation")
    assert before["evaluation/n"] == 4
    assert 0 < after["evaluation/loss"] < 0.7 * before["evaluation/loss"]


def test_teachers_are_not_saved(tiny_model: Path, teacher: Path, tmp_path: Path) -> None:
    folder = run.start(on_policy(tiny_model, teacher, 1, {}, checkpoints={"every": 1}), tmp_path / "run")
    saved = {path.name for path in (folder / "checkpoints" / "step-000001").iterdir() if path.is_dir()}
    assert saved == {"policy"}


def test_a_run_that_was_not_exported_can_not_teach(tiny_model: Path, teacher: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this is a run folder, so export its model first"):
        run.start(on_policy(tiny_model, teacher.parent / "run", 1, {}), tmp_path / "run")


@pytest.mark.slow
def test_a_killed_run_with_a_teacher_resumes_to_the_same_bits(tiny_model: Path, teacher: Path, tmp_path: Path) -> None:
    algorithm = {"loss": "policy", "advantage": {"type": "teacher", "reward": "group"}, "minibatches": 3}
    changes: dict[str, Any] = {"checkpoints": {"every": 2}, "evaluation": {"every": 2}}
    recipe = write_recipe(tmp_path / "toy.yaml", on_policy(tiny_model, teacher, 5, algorithm, **changes))
    alone = tmp_path / "alone"
    done = whet("train", str(recipe), "--folder", str(alone))
    assert done.returncode == 0, done.stderr
    assert killed_and_resumed(recipe, tmp_path / "killed", "step.updated:4") == metrics(alone)


@pytest.mark.parametrize(
    ("algorithm", "changes", "why"),
    [
        ({}, {"sampling": {"top_p": 0.9}}, "sampling.top_k, top_p and min_p would cut some off"),
        ({"loss": "policy"}, {}, "loss = policy reads advantages, which no part of this algorithm fills"),
        (
            {"advantage": "teacher"},
            {},
            "advantage = teacher fills advantages, which no part of this algorithm reads; choose algorithm.loss=policy",
        ),
        (
            {"loss": "policy", "advantage": {"type": "teacher", "reward": "gae"}},
            {},
            "advantage = teacher reads values, which no part of this algorithm fills",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_anything_is_loaded(
    tiny_model: Path, teacher: Path, algorithm: dict[str, Any], changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        on_policy(tiny_model, teacher, 1, algorithm, **changes)


def test_truncated_sampling_keeps_the_probabilities_of_sampled_tokens(
    tiny_model: Path, teacher: Path, tmp_path: Path
) -> None:
    recipe = on_policy(tiny_model, teacher, 2, {"loss": "on_policy_distillation"}, sampling={"top_p": 0.9, "top_k": 9})
    trained = lines(run.start(recipe, tmp_path / "run"), "train")[1:]
    assert [line["learner/skipped"] for line in trained] == [0, 0]


def test_a_missing_teacher_is_named(tiny_model: Path, tmp_path: Path) -> None:
    recipe = load(Recipe, "distillation-quickstart", [f"model.path={tiny_model}"]).value
    with pytest.raises(WhetError, match=r"algorithm.teachers.tutor: model 'exported': there is no such folder"):
        run.start(recipe, tmp_path / "run")
