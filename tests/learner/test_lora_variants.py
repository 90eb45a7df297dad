"""rsLoRA and DoRA: what a generator gets computes what was trained, and what can't be done is refused at reading."""

import copy
import re
from typing import Any

import pytest
import torch

from tests.learner.parts import (
    ADAMW,
    PolicyGradient,
    assert_close,
    assert_same,
    cut,
    published,
    some_batch,
    weights,
    whole,
    worker,
)
from tests.toy import toy_recipe
from whet.base.errors import ConfigError, WhetError
from whet.config import SettingsError
from whet.learner.state import load_weights
from whet.models.config import LoraSettings

VARIANTS = [
    LoraSettings(rank=4, alpha=6.0, rank_stabilized=True),
    LoraSettings(rank=4, alpha=6.0, dora=True),
    LoraSettings(rank=4, alpha=6.0, dora=True, rank_stabilized=True),
]
every_variant = pytest.mark.parametrize("lora", VARIANTS, ids=["rslora", "dora", "both"])


@every_variant
def test_the_published_weights_are_those_of_the_trained_model(qwen: Any, lora: LoraSettings) -> None:
    learner = worker(qwen, lora=lora)
    before = published(learner)
    for step in range(3):
        learner.update(whole(some_batch(step)), PolicyGradient())
    sent = published(learner)
    assert before.keys() == sent.keys()
    assert not torch.equal(sent["model.layers.0.mlp.up_proj.weight"], before["model.layers.0.mlp.up_proj.weight"])
    own = copy.deepcopy(learner.model)
    merged: Any = own.merge_and_unload()  # type: ignore[operator]
    assert_close(dict(merged.state_dict()), sent, tolerance=1e-10)


@pytest.mark.parametrize("change", [{"alpha": 12.0}, {"rank_stabilized": True}, {"quantize": "nf4"}], ids=str)
def test_settings_that_no_tensor_shows_are_compared(qwen: Any, tmp_path: Any, change: dict[str, Any]) -> None:
    lora = LoraSettings(rank=4, alpha=6.0)
    worker(qwen, lora=lora, precision="float32").state.save(tmp_path)
    other = lora.model_copy(update=change)
    says = rf"saved with model\.lora\.{next(iter(change))} = (6.0|False|None), not "
    with pytest.raises(WhetError, match=says):
        worker(qwen, lora=other, precision="float32").state.load(tmp_path)
    with pytest.raises(WhetError, match=says):
        load_weights(tmp_path, other.unseen)
    assert load_weights(tmp_path, lora.unseen)


@every_variant
def test_a_resumed_learner_continues_bit_for_bit(qwen: Any, tmp_path: Any, lora: LoraSettings) -> None:
    straight = worker(qwen, lora=lora, precision="float32")
    straight.update(cut(some_batch(0), 30), PolicyGradient())
    straight.state.save(tmp_path)
    resumed = worker(qwen, lora=lora, precision="float32", seed=5)
    resumed.state.load(tmp_path)
    for learner in (straight, resumed):
        learner.update(cut(some_batch(1), 30), PolicyGradient())
    assert_same(weights(straight), weights(resumed))
    assert_same(published(straight), published(resumed))


def test_dora_trains_the_norms_of_the_rows(qwen: Any) -> None:
    learner = worker(qwen, lora=VARIANTS[1], optimizer=ADAMW)
    norms = {name: p.detach().clone() for name, p in learner.module.by_name() if "magnitude" in name}
    learner.update(whole(some_batch()), PolicyGradient())
    now = dict(learner.module.by_name())
    assert norms
    assert any(not torch.equal(norm, now[name]) for name, norm in norms.items())


def test_doras_norms_are_the_same_where_fsdp_gathers_matrices_in_bfloat16(qwen: Any) -> None:
    learner = worker(qwen, lora=VARIANTS[1], precision="bfloat16")
    batch = whole(some_batch())
    learner.update(batch, PolicyGradient())
    (expected,) = learner.score(batch, {"logprobs"})
    for name, module in learner.model.named_modules():
        if name.endswith((".lora_A", ".lora_B")):
            module.to(torch.bfloat16)
    (scored,) = learner.score(batch, {"logprobs"})
    assert torch.equal(scored["logprobs"], expected["logprobs"])


def test_rank_stabilised_scaling_is_alpha_over_the_root_of_the_rank(qwen: Any) -> None:
    for lora, scale in ((VARIANTS[0], 3.0), (LoraSettings(rank=4, alpha=6.0), 1.5)):
        scales = {m.scaling["default"] for m in worker(qwen, lora=lora).model.modules() if hasattr(m, "lora_A")}
        assert scales == {scale}
        assert lora.scaled_alpha / lora.rank == scale


def test_what_dora_cannot_do_is_refused_at_reading(tiny_model: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape("can't apply model.lora.dora = true")):
        toy_recipe(tiny_model, model={"lora": {"dora": True}}, generator="vllm", weights={"lora": "adapter"})


def test_dora_is_not_for_experts() -> None:
    with pytest.raises(SettingsError, match="experts = true can't be combined with dora"):
        LoraSettings(experts=True, dora=True)
