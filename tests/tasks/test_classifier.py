"""A real classifier of random weights in a real process: its scores are what transformers gives, whatever the batch."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from tests.tiny import VOCAB, tiny_tokenizer
from tests.toy import toy_recipe
from whet.base.errors import WhetError
from whet.config import SettingsError
from whet.metrics.sinks.jsonl import read_metrics
from whet.run import run
from whet.tasks.episodes import play
from whet.tasks.isolated import IsolatedEnvironments
from whet.tasks.preference.reward_model import RewardModelTasks
from whet.tasks.reviews import Reviews

pytestmark = pytest.mark.usefixtures("forked_children")

ANSWERS = ["It was lovely.", "terrible " * 5, "x", "great great great", "y" * 300]
LABELS = {0: "bad", 1: "neutral", 2: "good"}


def save(folder: Path, kind: str = "bert", **changes: Any) -> Path:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 128, "pad_token_id": 256, "initializer_range": 0.5,
        "id2label": LABELS, "label2id": {name: number for number, name in LABELS.items()}, **changes,
    }  # fmt: skip
    if kind == "bert":
        model: Any = BertForSequenceClassification(BertConfig(**sizes))
    else:
        model = LlamaForSequenceClassification(LlamaConfig(**sizes))
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["bert", "llama"])
def classifier(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp(request.param), request.param)


def steps(answers: list[str], **settings: Any) -> list[Any]:
    taskset = RewardModelTasks(**{"taskset": Reviews(train_size=4, test_size=2)} | settings)

    async def main() -> list[Any]:
        environments = IsolatedEnvironments(taskset.open())
        task = taskset.tasks("train")[0]
        try:
            return [step for _, step in await asyncio.gather(*(play(environments.make(task), a) for a in answers))]
        finally:
            await environments.close()

    return asyncio.run(main())


def expected(folder: Path, value: str) -> list[float]:
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        rows = [tiny_tokenizer()(answer[:128], return_tensors="pt")["input_ids"] for answer in ANSWERS]
        logits = torch.cat([model(row).logits for row in rows]).double()
    return (logits if value == "logit" else logits.softmax(-1))[:, 2].tolist()


@pytest.mark.parametrize("value", ["probability", "logit"])
def test_scores_are_those_of_transformers_and_do_not_depend_on_the_batch(classifier: Path, value: str) -> None:
    settings = {"model": str(classifier), "label": "good", "value": value, "clamp": 100.0}
    together = steps(ANSWERS, **settings)
    assert [step.reward for step in together] == pytest.approx(expected(classifier, value), rel=1e-4)
    assert len({step.reward for step in together}) == len(ANSWERS)
    assert ["reward_model_cut" in step.scores for step in together] == [False] * 4 + [True]
    assert {"grade", "correct", "tone"} <= together[0].scores.keys()
    alone = steps(ANSWERS[1:2], **settings | {"label": 2})
    assert alone[0].reward == together[1].reward


@pytest.mark.parametrize("scale", [1.0, -2.0])
def test_an_empty_answer_gets_the_least_also_where_the_label_is_lowered(tmp_path: Path, scale: float) -> None:
    model = save(tmp_path)
    empty, other = steps([" \n", "fine"], model=str(model), label="bad", scale=scale)
    assert empty.reward == min(0.0, scale) < other.reward
    (empty,) = steps([""], model=str(model), label="bad", scale=scale, value="logit", clamp=3.0)
    assert empty.reward == -3.0


def test_one_label_or_independent_labels_have_probabilities_of_their_own(tmp_path: Path) -> None:
    several = save(tmp_path / "several", problem_type="multi_label_classification")
    total = sum(steps(["It was lovely."], model=str(several), label=number)[0].reward for number in LABELS)
    assert total != pytest.approx(1.0, abs=1e-3)
    one = save(tmp_path / "one", id2label={0: "toxic"}, label2id={"toxic": 0}, num_labels=1)
    (step,) = steps(["It was lovely."], model=str(one), label="toxic")
    assert 0 < step.reward < 1


def test_what_is_not_a_classifier_or_lacks_the_label_is_refused_in_words(tmp_path: Path, tiny_model: Path) -> None:
    with pytest.raises(WhetError, match=r"has no label 'awful'; its labels are bad \(0\), neutral \(1\), good \(2\)"):
        steps(["x"], model=str(save(tmp_path)), label="awful")
    with pytest.raises(WhetError, match=r"is not a classifier: it lacks score\.weight"):
        steps(["x"], model=str(tiny_model), label=0)


def test_settings_that_do_not_fit_are_refused() -> None:
    for settings, why in (
        ({"label": 0, "value": "logit"}, "set clamp"),
        ({"value": "logit", "clamp": 1.0}, "only with a label"),
    ):
        with pytest.raises(SettingsError, match=why):
            RewardModelTasks(taskset=Reviews(), model="m", **settings)  # type: ignore[arg-type]


def test_a_policy_is_trained_with_a_classifier(tiny_model: Path, tmp_path: Path) -> None:
    data = {"type": "reward_model", "taskset": {"type": "tests.toy:Lowercase"}, "label": "good"}
    data["model"] = str(save(tmp_path / "classifier"))
    folder = run.start(toy_recipe(tiny_model, steps=2, data=data), tmp_path / "run")
    trained = [line for line in read_metrics(folder / "metrics.jsonl") if "reward/mean" in line]
    assert len(trained) == 2
    assert all(0 < line["reward/mean"] < 1 for line in trained)
