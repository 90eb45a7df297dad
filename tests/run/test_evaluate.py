"""Evaluation: what it measures, and that it never turns a failure into a number."""

import asyncio
import json
import logging
import math
import re
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_llama, tiny_tokenizer
from tests.toy import Flaky, Hanging, Lowercase, toy_recipe, write_recipe
from tests.weights.collected import load_into
from whet.base.errors import ConfigError, DataError, DeadlineError
from whet.cli.main import main
from whet.config import SettingsError, load
from whet.core.types import Task
from whet.metrics.sinks.jsonl import read_metrics
from whet.processes.compute import run_computing
from whet.rollouts.session import Player
from whet.run.build import build_generator, build_renderer, trained_weights
from whet.run.evaluate import evaluate_tasks
from whet.run.evaluate_model import evaluate_model
from whet.run.evaluation import EvaluationConfig
from whet.run.recipe import Recipe
from whet.run.run import start
from whet.run.scores import Report
from whet.show.facts import Summary
from whet.tasks import isolated
from whet.tasks.episodes import SingleTurn
from whet.tasks.isolated import IsolatedEnvironments

FAILING_TWICE = {f"toy/test/{i}": 2 for i in range(12)}

SHORT = {"taskset": {"type": "tests.toy:Lowercase"}, "sampling": {"max_new_tokens": 4}}


class Everywhere(Lowercase):
    """Both splits have the same tasks."""

    def tasks(self, split: str) -> Sequence[Task]:
        return super().tasks("train")


def measured(folder: Path, taskset: Lowercase, **settings: Any) -> Report:
    async def go() -> Report:
        recipe = toy_recipe(folder)
        renderer = build_renderer(recipe)
        generator = build_generator(recipe, renderer)
        await load_into(generator, trained_weights(recipe, None).tensors())
        config, environments = EvaluationConfig(**settings), IsolatedEnvironments(taskset.open())
        try:
            tasks, player = taskset.tasks("test"), Player(generator, renderer)
            return await evaluate_tasks(
                tasks, taskset, environments, player, config.sampling(recipe.sampling), config, seed=1
            )
        finally:
            await generator.close()
            await environments.close()

    return asyncio.run(go())


def test_the_same_answers_whatever_runs_beside_them(tiny_model: Path) -> None:
    wide = measured(tiny_model, Lowercase(), samples=4, temperature=1.0)
    narrow = measured(tiny_model, Lowercase(), samples=4, temperature=1.0, concurrency=2)
    assert wide == narrow
    assert wide.n == 12
    assert len(wide.episodes) == 48
    assert set(wide.pass_at) == {1, 2, 4}
    assert wide.low <= wide.accuracy <= wide.high


def test_an_environment_that_recovers_costs_nothing_but_a_line(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert (
        measured(tiny_model, Flaky(failures=FAILING_TWICE, met={})).reward == measured(tiny_model, Lowercase()).reward
    )
    (said,) = warnings(caplog)
    assert "repeated with success: 24 x ConnectionError:" in said


def test_an_environment_that_stays_away_is_an_error_not_a_zero(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(DataError, match=r"evaluation of toy/test/\d+ failed.*the grader is away"):
        measured(tiny_model, Flaky(failures=FAILING_TWICE, met={}), retries=0)
    assert not warnings(caplog), "the error alone says it"


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_evaluation_that_hangs_meets_its_deadline(tiny_model: Path) -> None:
    with pytest.raises(DeadlineError, match=r"evaluation\.deadline = 0\.3 s"):
        measured(tiny_model, Hanging(), deadline=0.3)


class Unclosed(SingleTurn):
    async def close(self) -> None:
        await asyncio.sleep(60)


class Unclosing(Lowercase):
    """Closing an episode never comes to an end."""

    def make(self, task: Task) -> Unclosed:
        return Unclosed(self, task)


def test_episodes_that_do_not_close_are_named_and_count(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(isolated, "_SLOWEST", 0.1)
    assert measured(tiny_model, Unclosing(), concurrency=1) == measured(tiny_model, Lowercase())
    (said,) = warnings(caplog)
    assert re.match(r"Unclosed\.close \(.*test_evaluate.py:\d+\) has not ended after 0\.1 s", said)


class Failing(Unclosing):
    """One grade fails, too."""

    def grade(self, task: Task, answer: str) -> dict[str, float] | Awaitable[dict[str, float]]:
        if task.uid.endswith("/3"):
            raise OSError("the grader is away")
        return super().grade(task, answer)


def test_an_episode_that_failed_does_not_wait_until_it_is_closed(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated, "_GIVEN_UP", 0.1)
    with pytest.raises(DataError, match=r"evaluation of toy/test/3 failed: .*the grader is away"):
        measured(tiny_model, Failing(), retries=0, deadline=30.0)


def test_a_recipe_can_be_evaluated_without_a_run(tiny_model: Path) -> None:
    recipe = toy_recipe(tiny_model)
    report = run_computing(evaluate_model(recipe, limit=3))
    assert report.n == 3
    assert report.metrics() == run_computing(evaluate_model(recipe, model=str(tiny_model), limit=3)).metrics()


def test_a_set_that_can_not_be_evaluated_is_refused_first_and_by_name(tiny_model: Path, tmp_path: Path) -> None:
    away = {"type": "tests.toy:Flaky", "failures": FAILING_TWICE, "met": {}}  # an evaluation would end with its error
    for kind, error, words in (
        ({"type": "calculator"}, ConfigError, "evaluation set late: the chat template leaves out the tools"),
        (
            {"type": "tests.toy:Lowercase", "size": 0},
            DataError,
            "evaluation set late: it has no task in the split test",
        ),
        ({"type": "gsm8k", "path": "none.jsonl"}, DataError, "evaluation set late: .*none.jsonl"),
    ):
        sets = {"early": {"data": {"type": "tests.toy:Lowercase"}}, "late": {"data": kind}}
        with pytest.raises(error, match=words):
            run_computing(
                evaluate_model(recipe := toy_recipe(tiny_model, data=away, evaluation={"sets": sets, "retries": 0}))
            )
        with pytest.raises(error, match=words):
            start(recipe, tmp_path / str(kind["type"]).replace(":", "."))


def test_the_options_of_a_caller_hold_for_every_set(tiny_model: Path) -> None:
    sets = {
        "more": {"data": {"type": "tests.toy:Lowercase"}, "samples": 3, "temperature": 0.5},
        "mixed": {"data": {"type": "blend", "of": {"short": SHORT}}},
    }
    report = run_computing(
        evaluate_model(toy_recipe(tiny_model, evaluation={"sets": sets}), limit=2, samples=2, temperature=1.0)
    )
    assert [(each.n, each.samples) for each in report.sets.values()] == [(2, 2), (2, 2)]
    assert report.sets["mixed"].length_mean <= 4, "the limits of an environment hold"


def test_majorities_are_counted_only_where_all_answers_can_be_equal(tiny_model: Path) -> None:
    sums, letters = {"type": "arithmetic"}, {"type": "tests.toy:Lowercase"}
    both = {"sums": {"taskset": sums}, "letters": {"taskset": letters}}
    sets = {
        "mixed": {"data": {"type": "blend", "of": both}},
        "alike": {"data": {"type": "blend", "of": {"sums": both["sums"]}}},
        "workers": {"data": {"type": "workers", "taskset": letters}},
    }
    found = run_computing(
        evaluate_model(toy_recipe(tiny_model, evaluation={"sets": sets}), limit=1, samples=2, temperature=1.0)
    ).sets
    counted = {
        "mixed": found["mixed"], **found["mixed"].sets, "alike": found["alike"], "workers": found["workers"]
    }  # fmt: skip
    assert [name for name, report in counted.items() if report.majority_at] == ["sums", "alike"]


def test_several_greedy_answers_are_refused_unless_turns_may_differ(tiny_model: Path) -> None:
    more = {"data": {"type": "tests.toy:Lowercase"}, "samples": 3}
    for settings, key, count in (({"samples": 2}, "evaluation", 2), ({"sets": {"a": more}}, "evaluation.sets.a", 3)):
        says = f"{key}.samples = {count} at temperature 0 gives {count} times the same answer; set {key}.temperature=1"
        with pytest.raises(ConfigError, match=says):
            toy_recipe(tiny_model, evaluation=settings)
        toy_recipe(tiny_model, evaluation=settings | {"temperature": 1.0})
        toy_recipe(tiny_model, evaluation=settings, sampling={"max_turns": 2}, learner={"max_tokens": 2000},
                   generator={"max_context": 2000})  # fmt: skip
    with pytest.raises(ConfigError, match=r"evaluation.samples = 2 .* \(of `whet eval`: --temperature 1\)"):
        run_computing(evaluate_model(toy_recipe(tiny_model), samples=2))


def test_a_run_without_tasks_of_its_own_to_evaluate_on_is_evaluated_on_its_sets_alone(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, sets = {"type": "arithmetic", "test_size": 0}, {"more": {"data": {"type": "tests.toy:Lowercase", "size": 3}}}
    best = {"best_metric": "evaluation/more/accuracy"}
    recipe = toy_recipe(tiny_model, steps=1, data=data, evaluation={"sets": sets}, checkpoints=best)
    folder = start(recipe, tmp_path / "run")
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "evaluation"]
    assert [line["evaluation/more/n"] for line in lines] == [3, 3]
    assert {key.rpartition("/")[0] for key in lines[0] if key.startswith("evaluation/")} == {"evaluation/more"}
    assert Summary.of(lines).sets.keys() == {"more"}
    found = []
    for options in (["--on", "more"], [], ["--against", str(tiny_model)]):
        with pytest.raises(SystemExit, match="0"):
            main(["eval", str(folder), *options, "--json"])
        found.append(json.loads(capsys.readouterr().out)["sets"])
    assert found[0] == found[1]
    assert found[2]["more"]["difference"] == found[0]["more"]["accuracy"] - found[2]["more"]["against/accuracy"]
    report = run_computing(evaluate_model(recipe, run=folder))
    assert (report.n, report.sets["more"].n) == (0, 3)
    with pytest.raises(DataError, match=r"no task in the split test to evaluate on; choose another evaluation\.split"):
        run_computing(evaluate_model(toy_recipe(tiny_model, data=data)))


def test_answers_that_the_engine_would_cut_are_refused(tiny_model: Path) -> None:
    long = {"data": {"type": "tests.toy:Lowercase"}, "max_new_tokens": 500}
    for settings, key in (({"max_new_tokens": 500}, "evaluation"), ({"sets": {"a": long}}, "evaluation.sets.a")):
        with pytest.raises(ConfigError, match=f"{key}.max_new_tokens = 500 .* 628 tokens.*generator.max_context = 256"):
            toy_recipe(tiny_model, evaluation=settings)


def test_evaluated_tasks_that_are_trained_on_are_a_warning(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for kind, said in (("tests.run.test_evaluate:Everywhere", 1), ("tests.toy:Lowercase", 0)):
        caplog.clear()
        start(toy_recipe(tiny_model, data={"type": kind}, steps=1), tmp_path / kind)
        found = [text for text in warnings(caplog) if "are trained on, such as toy/train/0" in text]
        assert len(found) == said


def test_two_models_are_compared_task_by_task(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    tiny_llama(seed=3).save_pretrained(other)
    tiny_tokenizer().save_pretrained(other)
    recipe = write_recipe(tmp_path / "toy.yaml", toy_recipe(tiny_model, evaluation={"limit": 12}))
    for against, same in ((str(tiny_model), True), (str(other), False)):
        with pytest.raises(SystemExit, match="0"):
            main(["eval", str(recipe), "--against", against, "--json"])
        found = json.loads(capsys.readouterr().out)
        assert found["difference"] == pytest.approx(found["accuracy"] - found["against/accuracy"])
        assert found["difference_low"] <= found["difference"] <= found["difference_high"]
        assert (found["difference_p"] == 1) or not same
        assert (found["difference"] == 0) or not same
        assert (found["reward"] == found["against/reward"]) == same
    with pytest.raises(SystemExit, match="0"):
        main(["eval", str(recipe), "--against", str(other)])
    assert f"against {other}: " in capsys.readouterr().out


def test_two_models_are_compared_on_every_set_of_the_recipe(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_llama(seed=3).save_pretrained(other := tmp_path / "other")
    tiny_tokenizer().save_pretrained(other)
    sets = {"more": {"data": {"type": "tests.toy:Lowercase", "size": 20}}}
    recipe = write_recipe(tmp_path / "toy.yaml", toy_recipe(tiny_model, evaluation={"limit": 3, "sets": sets}))
    with pytest.raises(SystemExit, match="0"):
        main(["eval", str(recipe), "--against", str(other), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["n"], found["more/n"], found["against/more/n"]) == (3, 20, 20)
    assert found["more/difference"] == pytest.approx(found["more/accuracy"] - found["against/more/accuracy"])
    assert found["more/difference_low"] <= found["more/difference"] <= found["more/difference_high"]
    with pytest.raises(SystemExit, match="0"):
        main(["eval", str(recipe), "--against", str(other)])
    assert f"more, against {other}: " in capsys.readouterr().out


def test_a_comparison_is_that_of_the_single_tasks() -> None:
    def report(*per_task: float, samples: int = 1) -> Report:
        return Report(len(per_task), samples, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, per_task=list(per_task))

    before, after = report(0, 0, 0, 1, 0, 0, 1, 1), report(1, 1, 1, 1, 0, 1, 1, 0)
    found = after.compare(before)
    assert found["difference"] == 3 / 8
    assert found["difference_p"] == pytest.approx(2 * (1 + 5) / 2**5)
    before.sets, after.sets = {"a": report(0, 1), "b": report(1)}, {"a": report(1, 1), "c": report(1)}
    assert {name: found for name, found in after.compare(before).items() if name.endswith("/difference")} == {
        "a/difference": 0.5
    }
    assert "difference_p" not in report(0.5, 0.25, samples=4).compare(report(0.5, 0.5, samples=4))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"samples": 10**20}, "samples: expected greater than 0 and at most 100000"),
        ({"temperature": math.inf}, "temperature: expected a finite number"),
        ({"limit": 0}, "limit: expected"),
    ],
)
def test_changes_of_an_evaluation_are_checked_like_settings(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=f"^evaluation: {says}"):
        load(Recipe, "quickstart").value.evaluated_with(changes)
