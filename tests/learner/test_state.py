"""Save and load: bit-exact, and only into the learner that fits."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.learner.parts import (
    ADAMW,
    Poisoned,
    PolicyGradient,
    ValueLoss,
    assert_same,
    cut,
    published,
    some_batch,
    weights,
    whole,
    worker,
)
from whet.base.errors import WhetError
from whet.learner.optimizer_config import OptimizerConfig
from whet.models.config import LoraSettings

pytestmark = pytest.mark.usefixtures("learner_type")

LORA = LoraSettings(rank=2, alpha=4.0)


@pytest.mark.parametrize("settings", [{}, {"lora": LORA}, {"head": "value"}], ids=["all", "lora", "value"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_saved_learner_goes_on_bit_for_bit(qwen, tmp_path, settings, precision):
    optimizer = OptimizerConfig(lr=1e-2, weight_decay=0.1, warmup_steps=2, schedule="cosine")
    make = {"precision": precision, "optimizer": optimizer, **settings}
    loss = ValueLoss() if "head" in settings else PolicyGradient()
    straight = worker(qwen, **make)
    straight.update(cut(some_batch(0), 30), loss)
    straight.update(whole(some_batch(0)), loss if loss.outputs == {"values"} else Poisoned())
    straight.state.save(tmp_path)

    resumed = worker(qwen, seed=5, **make)
    resumed.state.load(tmp_path)
    assert (resumed.progress.step, resumed.progress.skipped, resumed.progress.skipped_in_a_row) == (
        straight.progress.step,
        straight.progress.skipped,
        straight.progress.skipped_in_a_row,
    )
    for step in (2, 3):
        straight.update(cut(some_batch(step), 30), loss)
        resumed.update(cut(some_batch(step), 30), loss)
    assert_same(weights(straight), weights(resumed))


def test_a_learner_saved_before_its_first_step_can_be_loaded(llama, tmp_path):
    worker(llama).state.save(tmp_path)
    resumed = worker(llama)
    resumed.state.load(tmp_path)
    assert resumed.progress.step == 0
    resumed.update(whole(some_batch()), PolicyGradient())


def test_a_folder_that_is_not_there_is_refused_and_not_made(llama, tmp_path):
    with pytest.raises(WhetError, match=r"missing doesn't exist on .*visible on all nodes"):
        worker(llama).state.save(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()


def test_only_adapters_are_saved_under_lora(qwen, tmp_path):
    worker(qwen, lora=LORA).state.save(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert names
    assert all("lora_" in name for name in names)


def test_the_saved_weights_are_a_plain_model(qwen, tmp_path):
    from transformers import AutoModelForCausalLM

    learner = worker(qwen, precision="float32")
    learner.update(whole(some_batch()), PolicyGradient())
    learner.state.save(tmp_path)
    (tmp_path / "config.json").write_text((qwen / "config.json").read_text())
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same(dict(plain.state_dict()), published(learner))


def test_loading_checks_everything_before_it_changes_anything(llama, qwen, tmp_path):
    saved = worker(llama, precision="float32")
    saved.update(whole(some_batch()), PolicyGradient())
    for name in ("good", "renamed", "reshaped"):
        (tmp_path / name).mkdir()
        saved.state.save(tmp_path / name)
    moments = load_file(tmp_path / "good/optimizer.safetensors")
    first = min(moments)
    save_file(
        {f"x{name}" if name == first else name: t for name, t in moments.items()},
        tmp_path / "renamed/optimizer.safetensors",
    )
    save_file(
        {n: t[None] if n == first else t for n, t in moments.items()}, tmp_path / "reshaped/optimizer.safetensors"
    )

    other = worker(llama, precision="float32", optimizer=ADAMW)
    before = weights(other)
    with pytest.raises(WhetError, match="is missing"):
        other.state.load(tmp_path / "renamed")
    with pytest.raises(WhetError, match=r"\[1, "):
        other.state.load(tmp_path / "reshaped")
    with pytest.raises(WhetError, match="no learner can be loaded"):
        other.state.load(tmp_path)
    assert_same(before, weights(other))
    assert not other.optimizer.state
    with pytest.raises(WhetError, match="float32"):
        worker(llama, precision="float64").state.load(tmp_path / "good")
    with pytest.raises(WhetError, match="does not fit"):
        worker(qwen, precision="float32").state.load(tmp_path / "good")


def test_a_measured_matmul_precision_comes_back_with_the_learner(llama, tmp_path):
    before = torch.get_float32_matmul_precision()
    try:
        learner = worker(llama, precision="float32", learner={"matmul_precision": "auto"})
        learner.state.save(tmp_path)
        facts = json.loads((tmp_path / "learner.json").read_text())
        other = {"highest": "medium", "medium": "highest"}[facts["matmul_precision"]]
        (tmp_path / "learner.json").write_text(json.dumps(facts | {"matmul_precision": other}))
        learner.state.load(tmp_path)
        assert learner.facts().matmul_precision == other == torch.get_float32_matmul_precision()
    finally:
        torch.set_float32_matmul_precision(before)
