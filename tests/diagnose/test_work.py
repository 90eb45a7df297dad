"""The work of a run as ``whet plan`` counts it, before the run."""

import json
from pathlib import Path

import pytest

from tests.rows import texts, write_rows
from tests.toy import read_settings, toy_recipe, write_recipe
from whet.base.errors import DataError
from whet.cli.main import main
from whet.diagnose.duration import estimate
from whet.diagnose.plan import add_work, make_plan
from whet.diagnose.work import count_work
from whet.metrics.sinks.jsonl import FILE, read_lines
from whet.run.machine import decide
from whet.run.recipe import Recipe
from whet.run.run import start


def on_rows(model: Path, folder: Path, **changes: object) -> Recipe:
    """Return a recipe of SFT on 30 rows, of which one is too long."""
    rows = [{"prompt": f"What is {i} + 1?", "completion": f"It is {i + 1}." + " Yes." * (i % 5)} for i in range(29)]
    rows.append({"prompt": "long", "completion": "word " * 300})
    data = {"type": "supervised", "path": str(write_rows(folder / "rows.jsonl", rows)), "max_tokens": 200}
    settings = {
        "epochs": 2,
        "model": {"path": str(model)},
        "data": data | {"batch_size": 4, "test_size": 3} | changes,
        "algorithm": {"type": "sft"},
        "checkpoints": {"every": 0, "best_metric": "evaluation/loss", "mode": "min"},
        "sinks": ["jsonl"],
    }
    return read_settings(settings)


def test_rows_steps_and_tokens_are_those_of_the_run(tiny_model: Path, tmp_path: Path) -> None:
    recipe = on_rows(tiny_model, tmp_path)
    counted, work, _ = count_work(recipe)
    assert (work.unit, work.train, work.unusable) == ("rows", work.counted + 1, 1)
    assert work.steps == counted.steps == work.optimizer_steps == -(-2 * work.train // 4)
    run = start(recipe, tmp_path / "run")
    lines = [line for _, _, line in read_lines(run / FILE)]
    trained = sum(line.get("learner/tokens", 0) for line in lines)
    assert trained == pytest.approx(work.trained_per_epoch * work.steps * 4 / work.counted, rel=0.05)
    assert sum("evaluation/loss" in line for line in lines) == work.evaluations


def test_answers_count_with_their_maximal_length(tiny_model: Path) -> None:
    recipe = toy_recipe(tiny_model)
    _, work, samples = count_work(recipe)
    assert (work.unit, work.train, work.held_out, work.evaluations) == ("tasks", 12, 4, 2)
    assert (work.steps_per_epoch, work.trained_per_step) == (4.0, 3 * 4 * 8)
    assert work.at_most
    assert samples.groups == 12
    assert [int(batch.trained.sum()) for batch in samples.evaluations[""].batches] == [4 * 8]


def test_additional_sets_count_with_their_own_settings(tiny_model: Path) -> None:
    own = {"max_new_tokens": 20, "samples": 2, "temperature": 1.0, "limit": 3}
    sets = {"long": {"data": {"type": "tests.toy:Lowercase"}, **own}}
    recipe = decide(toy_recipe(tiny_model, evaluation={"sets": sets}), starts=False)[0]
    _, work, samples = count_work(recipe)
    assert (work.held_out, work.sets) == (4, {"long": 3})
    assert [int(batch.trained.sum()) for batch in samples.evaluations["long"].batches] == [3 * 2 * 20]
    time = estimate(recipe, work, samples)
    assert time is not None
    assert set(time.evaluations) == {"", "long"}
    assert time.total == pytest.approx(4 * (time.sampling + time.learning) + 2 * sum(time.evaluations.values()))
    away = {"away": {"data": {"type": "gsm8k"}}}
    words = r"the evaluation set away: hf:openai/gsm8k:main:\w+ is on the web, and a plan downloads nothing"
    with pytest.raises(DataError, match=f"^{words}"):
        count_work(toy_recipe(tiny_model, evaluation={"sets": away}))


def test_data_on_the_web_are_named_with_their_part(tmp_path: Path, tiny_model: Path) -> None:
    here = str(write_rows(tmp_path / "rows.jsonl", texts(30)))
    of = {name: {"rows": {"type": "supervised", "path": path}} for name, path in (("a", here), ("b", "hf:b:train"))}
    data = {"type": "mixture", "of": of}
    sft = {"steps": 1, "model": {"path": str(tiny_model)}, "data": data, "algorithm": "sft", "sinks": ["jsonl"]}
    with pytest.raises(DataError, match=r"^data: the part b: hf:b:train is on the web"):
        count_work(read_settings(sft))
    parts = {"toy": {"taskset": "tests.toy:Lowercase"}, "sums": {"taskset": "gsm8k"}}
    with pytest.raises(DataError, match=r"^data: the environment sums: hf:openai/gsm8k:main:train is on the web"):
        count_work(toy_recipe(tiny_model, data={"type": "blend", "of": parts}))


def test_environments_of_a_blend_count_by_their_weights_and_limits(tiny_model: Path) -> None:
    parts = {
        "short": {"weight": 3, "taskset": {"type": "tests.toy:Lowercase"}, "sampling": {"max_new_tokens": 2}},
        "many": {"weight": 1, "taskset": {"type": "tests.toy:Lowercase", "size": 500}},
    }
    _, work, _ = count_work(toy_recipe(tiny_model, data={"type": "blend", "of": parts}))
    assert work.trained_per_step == round(3 * 4 * (0.75 * 2 + 0.25 * 8))


def test_a_group_that_is_cut_into_micro_batches_is_estimated(tiny_model: Path) -> None:
    recipe = toy_recipe(tiny_model, learner={"max_tokens": 150}, algorithm={"group_size": 20})
    add_work(plan := make_plan(recipe, 0), recipe)
    assert plan.time is not None


def test_time_is_estimated_by_parts_and_only_where_it_was_measured(tiny_model: Path) -> None:
    recipe = decide(toy_recipe(tiny_model), starts=False)[0]
    time = estimate(*count_work(recipe))
    assert time is not None
    assert min(time.sampling, time.learning, time.evaluations[""]) > 0
    assert time.total == pytest.approx(4 * (time.sampling + time.learning) + 2 * time.evaluations[""])
    again = {"learner": {"activation_checkpointing": True, "matmul_precision": "highest"}}
    repeated = estimate(*count_work(decide(toy_recipe(tiny_model, **again), starts=False)[0]))
    assert repeated is not None
    assert repeated.learning > time.learning
    ranks = toy_recipe(tiny_model, cluster={"type": "processes"}, parallel={"fsdp": 2})
    assert estimate(*count_work(decide(ranks, starts=False)[0])) is None


def test_data_that_can_not_be_counted_are_a_warning(tiny_model: Path, tmp_path: Path) -> None:
    for path, words in (
        ("hf:some/rows:train", "not counted: data: hf:some/rows:train is on the web, and a plan downloads nothing"),
        ("none.jsonl", "none.jsonl"),
    ):
        recipe = on_rows(tiny_model, tmp_path, path=path)
        with pytest.raises(DataError):
            count_work(recipe)
        add_work(plan := make_plan(recipe, 0), recipe)
        assert plan.work is plan.time is None
        assert words in plan.warnings[-1]


def test_the_command_prints_rows_tokens_and_time(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(write_recipe(tmp_path / "toy.yaml", on_rows(tiny_model, tmp_path)))
    for options in ([], ["--json"]):
        with pytest.raises(SystemExit) as ended:
            main(["plan", recipe, *options])
        assert ended.value.code == 0
        said = capsys.readouterr().out
        if options:
            values = json.loads(said)
            assert values["work"]["optimizer_steps"] == values["work"]["steps"] > 0
            assert values["time"]["sampling"] == 0 < values["time"]["total"]
        else:
            assert "an epoch is 27 rows in 6.75 steps: " in said
            assert "learning from a step" in said
            assert "sampling a step" not in said
