"""Whole runs over rows, with a tiny random model: it learns texts, preferences and judgement, and resumes exactly."""

import asyncio
import gc
import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.e2e.test_learning import lines
from tests.e2e.test_resume import killed_and_resumed, metrics
from tests.forks import whet
from tests.groups import group
from tests.rows import labelled, pairs, rows_recipe, texts, write_rows
from tests.toy import toy_recipe, write_recipe
from whet import api as whet_api
from whet.base.errors import ConfigError, WhetError
from whet.chat.renderer import Renderer
from whet.checkpoint.export import export
from whet.core.batch import Batch
from whet.data.rows import SupervisedRows
from whet.learner import worker
from whet.learner.learner import WorkerLearner
from whet.learner.worker import LearnerWorker
from whet.losses.preference import DPOLoss
from whet.metrics.statistics import wilson
from whet.run import run
from whet.run.rows_feed import RowsFeed, measure, measure_rows
from whet.show.report import write_report
from whet.show.runs import RunState
from whet.show.summary import commands

NO_CHECKPOINTS = {"every": 0}


def whet_json(*words: Any) -> dict[str, float]:
    done = whet(*map(str, words), "--json")
    assert done.returncode == 0, done.stderr
    result: dict[str, float] = json.loads(done.stdout)
    return result


def test_a_tiny_model_learns_eight_texts_by_heart(tiny_model: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "texts.jsonl", texts(8))
    recipe = rows_recipe(
        tiny_model, "supervised", path, {"type": "sft"}, steps=60, optimizer={"lr": 5e-3}, checkpoints=NO_CHECKPOINTS
    )
    folder = run.start(recipe, tmp_path / "run")
    losses = [line["loss"] for line in lines(folder, "train")[1:]]
    assert losses[0] > 4
    assert losses[-1] < 0.1
    assert not lines(folder, "evaluation"), "eight rows are too few to hold any out"
    assert not (folder / "rollouts").exists()


@pytest.mark.parametrize(
    "loss",
    [
        {"type": "dpo", "beta": 0.5},
        pytest.param({"type": "dpo", "form": "ipo"}, marks=pytest.mark.slow),
        pytest.param({"type": "dpo", "form": "hinge", "sft_weight": 0.1}, marks=pytest.mark.slow),
        pytest.param({"type": "dpo", "form": {"type": "robust", "label_smoothing": 0.1}}, marks=pytest.mark.slow),
        "simpo",
        {"type": "orpo", "weight": 1.0},
    ],
    ids=["dpo", "ipo", "hinge", "robust", "simpo", "orpo"],
)
def test_held_out_pairs_are_ranked_correctly_after_training(tiny_model: Path, tmp_path: Path, loss: Any) -> None:
    path = write_rows(tmp_path / "pairs.jsonl", pairs(80))
    algorithm = {"type": "dpo", "loss": loss}
    recipe = rows_recipe(tiny_model, "preference", path, algorithm, steps=15, checkpoints=NO_CHECKPOINTS)
    folder = run.start(recipe, tmp_path / "run")
    before, after = lines(folder, "evaluation")
    assert before["evaluation/n"] == after["evaluation/n"] == 8
    assert after["evaluation/accuracy"] > 0.9 >= before["evaluation/accuracy"]
    assert after["evaluation/low"] < after["evaluation/accuracy"] <= after["evaluation/high"]
    assert after["evaluation/loss"] < before["evaluation/loss"]


def test_a_reward_model_learns_to_rank(tiny_model: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "pairs.jsonl", pairs(80))
    recipe = rows_recipe(tiny_model, "preference", path, {"type": "reward_model"}, steps=15)
    folder = run.start(recipe, tmp_path / "run")
    before, after = lines(folder, "evaluation")
    assert after["evaluation/accuracy"] == 1 > before["evaluation/accuracy"]
    assert "loss" in lines(folder, "train")[-1]
    assert (folder / "checkpoints" / "step-000015" / "reward_model" / "model.safetensors").exists()
    again = whet_json("eval", folder)
    said = {name.removeprefix("evaluation/"): value for name, value in after.items() if name.startswith("evaluation/")}
    assert again == pytest.approx(said)
    export(folder, tmp_path / "exported")
    judge = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")

    def score(prompt: str, answer: str) -> float:
        talk = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        return judge(**tokenizer.apply_chat_template(talk, return_tensors="pt", return_dict=True)).logits.item()

    for row in pairs(5, seed=9):
        assert score(row["prompt"], row["chosen"]) > score(row["prompt"], row["rejected"])


def test_kto_tells_held_out_good_and_bad_answers_apart(tiny_model: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "labelled.jsonl", labelled(60))
    algorithm = {"type": "kto", "loss": {"type": "kto", "beta": 0.3, "desirable_weight": 1.2}}
    recipe = rows_recipe(tiny_model, "labelled", path, algorithm, steps=20, checkpoints=NO_CHECKPOINTS)
    folder = run.start(recipe, tmp_path / "run")
    before, after = lines(folder, "evaluation")
    assert before["evaluation/accuracy"] == 0.5, "at first the policy is the reference, and every implicit reward is 0"
    assert after["evaluation/accuracy"] > 0.8
    assert after["evaluation/low"] < after["evaluation/accuracy"] <= after["evaluation/high"]
    assert after["evaluation/loss"] < before["evaluation/loss"]
    assert "evaluation/margin" not in after
    trained = lines(folder, "train")[1:]
    assert trained[0]["preference/reference_point"] == 0
    assert all(line["preference/reference_point"] >= 0 for line in trained)
    assert any(line["preference/reference_point"] > 0 for line in trained)
    assert trained[-1]["preference/desirable_reward"] > trained[-1]["preference/undesirable_reward"]


class Watched:
    """A record of the reference models that were loaded, and that are still loaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.models: list[weakref.ref[Any]] = []
        load, update = worker.build_model, LearnerWorker.update
        self.alive_in_updates: list[int] = []

        def watched_load(*args: Any, train: bool, **more: Any) -> Any:
            module = load(*args, train=train, **more)
            if not train:
                self.models.append(weakref.ref(module.model))
            return module

        def watched_update(learner: LearnerWorker, *arguments: Any) -> Any:
            gc.collect()
            self.alive_in_updates.append(sum(model() is not None for model in self.models))
            return update(learner, *arguments)

        monkeypatch.setattr(worker, "build_model", watched_load)
        monkeypatch.setattr(LearnerWorker, "update", watched_update)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8.0}], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_a_cached_reference_gives_the_same_run_and_is_not_in_memory(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, lora: Any
) -> None:
    name, rows = ROWS[kind]
    path = write_rows(tmp_path / "rows.jsonl", rows())

    def trained(reference: str) -> tuple[list[dict[str, Any]], Watched, Path]:
        changes = {"steps": 9, "model": {"path": str(tiny_model), "lora": lora}, "checkpoints": NO_CHECKPOINTS}
        watched = Watched(monkeypatch)
        recipe = rows_recipe(
            tiny_model, name, path, {"type": kind, "reference": reference}, evaluation={"every": 4}, **changes
        )
        folder = run.start(recipe, tmp_path / reference)
        monkeypatch.undo()
        return metrics(folder), watched, folder

    live, watched_live, folder = trained("live")
    assert watched_live.alive_in_updates == [0 if lora else 1] * 9
    assert not (folder / "reference.safetensors").exists()
    cached, watched, folder = trained("cached")
    assert len(watched.models) == (0 if lora else 1)
    assert watched.alive_in_updates == [0] * 9, "the reference was let go before the first step"
    assert (folder / "reference.safetensors").exists()

    def train_lines(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [line for line in found if line["kind"] == "train"]

    epoch = [line for line in train_lines(live) if line.get("data/epoch", 0) <= 1]
    assert 4 < len(epoch) < 10
    assert train_lines(cached)[: len(epoch)] == epoch, "to the bit, while rows come for the first time"
    assert len(live) == len(cached)
    for one, other in zip(live, cached, strict=True):
        assert one.keys() == other.keys()
        numbers = {key: value for key, value in one.items() if isinstance(value, float)}
        assert {key: other[key] for key in numbers} == pytest.approx(numbers, rel=2e-3, abs=2e-4)


def test_an_evaluation_looks_up_what_its_run_has_cached(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path / "pairs.jsonl", pairs(40))
    recipe = rows_recipe(tiny_model, "preference", path, {"type": "dpo", "reference": "cached"}, steps=1)
    folder = run.start(recipe, tmp_path / "run")
    file = folder / "reference.safetensors"
    before, watched = file.read_bytes(), Watched(monkeypatch)
    found = asyncio.run(measure_rows(recipe, folder))
    assert not watched.models, "no reference was loaded"
    assert file.read_bytes() == before
    file.unlink()
    assert asyncio.run(measure_rows(recipe, folder)) == pytest.approx(found, rel=1e-4)
    assert (len(watched.models), file.exists()) == (1, False)


def test_an_evaluation_reads_another_checkpoint_where_a_run_removes_the_one_that_it_reads(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path / "texts.jsonl", texts(40))
    checkpoints = {"every": 1, "keep_last": 2}
    recipe = rows_recipe(tiny_model, "supervised", path, {"type": "sft"}, steps=2, checkpoints=checkpoints)
    folder = run.start(recipe, tmp_path / "run")
    read, load = list[str](), WorkerLearner.load

    async def load_while_a_run_removes(learner: WorkerLearner, of_role: Path) -> None:
        read.append(of_role.parent.name)
        if len(read) == 1:
            shutil.rmtree(of_role.parent)
        await load(learner, of_role)

    monkeypatch.setattr(WorkerLearner, "load", load_while_a_run_removes)
    assert asyncio.run(measure_rows(recipe, folder))["evaluation/n"] > 0
    assert sorted(read) == ["step-000001", "step-000002"]


def test_rows_beyond_the_limit_are_not_rendered(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path / "texts.jsonl", texts(40))
    settings = {"split": "train", "limit": 3}
    recipe = rows_recipe(tiny_model, "supervised", path, {"type": "sft"}, evaluation=settings)
    feed = RowsFeed(recipe, Renderer(AutoTokenizer.from_pretrained(tiny_model)))
    rendered: list[Any] = []
    group = SupervisedRows.group
    monkeypatch.setattr(SupervisedRows, "group", lambda *given: rendered.append(given) or group(*given))
    assert len(feed._groups()) == len(rendered) == 3


def test_changed_rows_are_noticed_when_a_run_with_a_cached_reference_resumes(tiny_model: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "pairs.jsonl", pairs(40))
    algorithm = {"type": "dpo", "reference": "cached"}
    folder = run.start(rows_recipe(tiny_model, "preference", path, algorithm, steps=2), tmp_path / "run")
    file = folder / "reference.safetensors"
    before = file.read_bytes()
    run.resume(folder)
    assert file.read_bytes() == before
    run.resume(folder, ["steps=4"])
    assert "lacked" in (folder / "log.txt").read_text()
    longer = file.read_bytes()
    assert len(longer) > len(before)
    rows = pairs(40)
    write_rows(path, [row | {"chosen": row["chosen"] + "!"} for row in rows])
    run.resume(folder, ["steps=5"])
    assert len(file.read_bytes()) > len(longer)
    run.resume(folder, ["steps=6", "learner.precision=bfloat16"])
    assert "was made with another precision" in (folder / "log.txt").read_text()


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (
            ['{"prompt": "p", "completion": "c", "label": true}'] * 30 + ['{"prompt": "p", "label": true}'],
            ":31: field 'co",
        ),
        (['{"prompt": "p", "completion": "c", "label": 1}'], ":1: field 'label' must be true or false, not 1"),
        (["\ufeff"], "holds no rows"),
        (['{"prompt": "p", "completion": "c", "label": true}'], "a batch of 8 groups can't be drawn from 1 rows"),
    ],
)
def test_wrong_rows_end_in_one_line_before_anything_is_trained(
    tiny_model: Path, tmp_path: Path, lines: list[str], says: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines))
    recipe = write_recipe(tmp_path / "toy.yaml", rows_recipe(tiny_model, "labelled", path, {"type": "kto"}))
    done = whet("train", str(recipe), "--folder", str(tmp_path / "run"))
    assert done.returncode != 0
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("error: ")


def test_a_loss_without_a_reference_can_not_cache_it(tiny_model: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "pairs.jsonl", pairs(8))
    with pytest.raises(ConfigError, match=r"reference = cached, but algorithm\.loss uses no reference model"):
        rows_recipe(tiny_model, "preference", path, {"type": "dpo", "loss": "simpo", "reference": "cached"})


def test_a_fine_tuned_model_is_exported(tiny_model: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "texts.jsonl", texts(8))
    folder = run.start(rows_recipe(tiny_model, "supervised", path, {"type": "sft"}, steps=2), tmp_path / "run")
    export(folder, tmp_path / "exported")
    assert (tmp_path / "exported" / "model.safetensors").exists()


def test_a_reward_model_learns_scores(tiny_model: Path, tmp_path: Path) -> None:
    rows = [row | {"score": float(i % 2)} for i, row in enumerate(texts(40))]
    path = write_rows(tmp_path / "scored.jsonl", rows)
    algorithm = {"type": "reward_model", "loss": "score_regression"}
    recipe = rows_recipe(tiny_model, "scored", path, algorithm, steps=40, checkpoints=NO_CHECKPOINTS)
    folder = run.start(recipe, tmp_path / "run")
    before, after = lines(folder, "evaluation")
    assert after["evaluation/loss"] < 0.5 * before["evaluation/loss"]
    assert "evaluation/accuracy" not in after


ROWS: dict[str, Any] = {
    "sft": ("supervised", lambda: texts(40)),
    "dpo": ("preference", lambda: pairs(40)),
    "kto": ("labelled", lambda: labelled(20)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        {"type": "sft"},
        {"type": "dpo"},
        {"type": "dpo", "reference": "cached"},
        {"type": "kto", "reference": "cached"},
    ],
    ids=lambda algorithm: "-".join(algorithm.values()),
)
def test_a_killed_run_over_rows_resumes_to_the_same_bits(
    tiny_model: Path, tmp_path: Path, algorithm: dict[str, Any]
) -> None:
    name, rows = ROWS[algorithm["type"]]
    path = write_rows(tmp_path / "rows.jsonl", rows())
    changes = {"steps": 7, "checkpoints": {"every": 2}, "evaluation": {"every": 3}}
    recipe = write_recipe(tmp_path / "toy.yaml", rows_recipe(tiny_model, name, path, algorithm, **changes))
    alone = tmp_path / "alone"
    done = whet("train", str(recipe), "--folder", str(alone))
    assert done.returncode == 0, done.stderr
    assert killed_and_resumed(recipe, tmp_path / "killed", "step.updated:6") == metrics(alone)
    assert any(line.get("data/epoch", 0) > 1 for line in metrics(alone)), "it resumed within the second epoch"


def test_rows_of_one_prompt_are_never_in_both_splits(tiny_model: Path, tmp_path: Path) -> None:
    from tests.tiny import tiny_tokenizer

    twice = pairs(60) + [row | {"prompt": row["prompt"] + " "} for row in pairs(60, seed=1)]
    train_path = write_rows(tmp_path / "train.jsonl", twice)
    test_path = write_rows(tmp_path / "test.jsonl", pairs(10))
    renderer = Renderer(tiny_tokenizer())
    for given in ({}, {"test_path": str(test_path)}):
        recipe = rows_recipe(tiny_model, "preference", train_path, {"type": "dpo"}, data=given)
        asked = {
            split: [group.task.prompt[0]["content"].strip() for group in groups]
            for split, groups in recipe.rows.groups(renderer).items()
        }
        assert len(asked["test"]) in (10, 12)
        assert not set(asked["train"]) & set(asked["test"])
        assert len(set(asked["train"])) + len(set(asked["test"])) == 60


def test_data_that_an_algorithm_cannot_learn_from_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "texts.jsonl", texts(8))
    with pytest.raises(ConfigError, match="data is supervised, but DPO takes preference"):
        rows_recipe(tiny_model, "supervised", path, {"type": "dpo"})
    with pytest.raises(ConfigError, match="data is supervised, but GRPO takes a task set"):
        rows_recipe(tiny_model, "supervised", path, {"type": "grpo"})


def test_rows_are_read_and_not_answered_in_an_evaluation(tiny_model: Path, tmp_path: Path) -> None:
    from whet.processes.compute import run_computing
    from whet.run.evaluate_model import evaluate_model

    path = write_rows(tmp_path / "texts.jsonl", texts(40))
    recipe = rows_recipe(tiny_model, "supervised", path, {"type": "sft"})
    with pytest.raises(WhetError, match="here a task set is needed"):
        run_computing(evaluate_model(recipe))
    recipe_file = write_recipe(tmp_path / "toy.yaml", recipe)
    assert whet_json("eval", recipe_file).keys() == {"loss", "n"}
    assert whet_json("eval", recipe_file, "--limit", "3")["n"] == 3
    assert ": 3 rows of the train split" in whet("eval", str(recipe_file), "--limit", "3", "--split", "train").stdout
    for option in (["--samples", "2"], ["--temperature", "1"], ["--model", str(tiny_model)]):
        refused = whet("eval", str(recipe_file), *option)
        assert refused.returncode == 2
        assert f"error: {option[0]}: this recipe learns from rows" in refused.stderr
    few = write_recipe(tmp_path / "few.yaml", rows_recipe(tiny_model, "supervised", path, {"type": "sft"}))
    refused = whet("eval", str(few), "data.test_size=0")
    assert (refused.returncode, "no row is held out" in refused.stderr) == (1, True)


def test_only_commands_that_a_run_over_rows_can_take_are_suggested(tiny_model: Path, tmp_path: Path) -> None:
    for name, count, expected in (("eight", 8, []), ("forty", 40, ["evaluate"])):
        path = write_rows(tmp_path / f"{name}.jsonl", texts(count))
        recipe = rows_recipe(tiny_model, "supervised", path, {"type": "sft"}, steps=1)
        folder = run.start(recipe, tmp_path / name)
        assert list(commands(folder)) == ["resume", *expected, "export"]


def test_epochs_say_how_long_to_train(tiny_model: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "ten.jsonl", texts(10))
    changes = {"steps": 0, "epochs": 1.5, "evaluation": {"enabled": False}, "optimizer": {"warmup_steps": 2}}
    recipe = rows_recipe(tiny_model, "supervised", path, {"type": "sft"}, **changes)
    assert recipe.rows.batch_size == 8
    folder = run.start(recipe, tmp_path / "run")
    trained = [line for line in lines(folder, "train") if "loss" in line]
    assert [line["step"] for line in trained] == [1, 2], "9 rows are trained on: 13.5 are 2 batches"
    assert trained[-1]["data/epoch"] == pytest.approx(16 / 9)
    assert commands(folder)["resume"].endswith("epochs=3")
    run.resume(folder, ["epochs=2"])
    trained = [line for line in lines(folder, "train") if "loss" in line]
    assert trained[-1]["step"] == 3, "18 rows are 3 batches"
    assert "steps" in write_report(folder).read_text()
    with pytest.raises(ConfigError, match=r"has done 3 steps already, more than the 1 epoch of its recipe"):
        run.resume(folder, ["epochs=1"])


def test_the_number_of_steps_is_reported_when_it_changes(tiny_model: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "ten.jsonl", texts(10))
    changes = {"steps": 0, "epochs": 1, "evaluation": {"enabled": False}}
    folder = run.start(rows_recipe(tiny_model, "supervised", path, {"type": "sft"}, **changes), tmp_path / "run")

    def reported() -> list[float]:
        raw = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [line["run/steps"] for line in raw if "run/steps" in line]

    run.resume(folder)
    assert reported() == [2]
    run.resume(folder, ["epochs=2"])
    assert reported() == [2, 3]
    run.resume(folder, ["steps=4"])
    assert reported() == [2, 3, 4]
    assert RunState.of(folder).facts.steps == 4


def test_pairs_without_a_trained_token_are_not_counted() -> None:
    class Scores:
        async def score(self, batch: Batch, columns: set[str]) -> dict[str, torch.Tensor]:
            return {"logprobs": torch.full((len(batch),), -1.0)}

    pairs = [group(name, [1, 2], [[3], [4]]) for name in "ab"]
    for trajectory in pairs[1].trajectories:
        trajectory.spans[1].trained = False
    batch = Batch.from_groups(pairs).weigh("group")
    batch.reference_logprobs = torch.full((len(batch),), -1.0)
    found = asyncio.run(measure(batch, DPOLoss(), Scores(), lambda part: part.weigh("group"), "ab"))
    assert (found["evaluation/n"], found["evaluation/a/n"], found["evaluation/b/n"]) == (1, 1, 0)
    assert (found["evaluation/low"], found["evaluation/high"]) == wilson(0.5, 1)
    assert "evaluation/b/loss" not in found


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"steps": 0}, "set steps .* or epochs .*: neither is given"),
        ({"steps": 3, "epochs": 2}, "both are given"),
        ({"steps": 0, "epochs": 2, "rollouts": {"curriculum": "pass_rate"}}, "epochs can.t be counted, because roll"),
    ],
)
def test_a_recipe_sets_the_length_of_training_only_once(
    tiny_model: Path, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        toy_recipe(tiny_model, **changes)


def test_steps_and_epochs_replace_each_other() -> None:
    by_steps, by_epochs = whet_api.read("quickstart", steps=3), whet_api.read("quickstart", "epochs=3")
    assert (by_steps.steps, by_steps.epochs, by_steps.duration) == (3, None, "3 steps")
    assert (by_epochs.steps, by_epochs.epochs, by_epochs.duration) == (0, 3, "3 epochs")
    assert whet_api.read("quickstart", "epochs=2", steps=5).duration == "5 steps"


def test_a_reward_model_reads_the_whole_conversation_at_its_last_token(tiny_model: Path, tmp_path: Path) -> None:
    from whet.core.batch import Batch

    path = write_rows(tmp_path / "pairs.jsonl", pairs(10))
    renderer = Renderer(AutoTokenizer.from_pretrained(tiny_model))
    recipe = rows_recipe(tiny_model, "preference", path, {"type": "reward_model"})
    (group, *_) = recipe.rows.groups(renderer, judging=True)["train"]
    for trajectory in group.trajectories:
        plain = renderer.tokenizer.apply_chat_template(trajectory.messages, return_dict=False)
        assert trajectory.tokens[:-1] == plain
        assert trajectory.trained_tokens == 1
    batch = Batch.from_groups([group])
    before = batch.tokens[batch.predictor[batch.trained]].tolist()
    assert renderer.decode(before) == "\n\n", "the template writes a line break after the end of a turn"


def test_a_file_may_call_the_fields_by_other_names(tiny_model: Path, tmp_path: Path) -> None:
    from tests.tiny import tiny_tokenizer

    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "one", "answer": "two"}) + "\n")
    columns = {"prompt": "question", "completion": "answer"}
    recipe = rows_recipe(tiny_model, "supervised", path, {"type": "sft"}, data={"columns": columns})
    (group,) = recipe.rows.groups(Renderer(tiny_tokenizer()))["train"]
    assert [message["content"] for message in group.episodes[0].messages] == ["one", "two"]
