"""A worker's scores of a batch, and the weights it provides."""

import copy

import pytest
import torch

from tests.learner.parts import (
    Chosen,
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
from whet.base.errors import WhetError
from whet.core.batch import Batch
from whet.core.types import Distribution
from whet.learner.base import Top
from whet.models.config import LoraSettings

pytestmark = pytest.mark.usefixtures("learner_type")

LORA = LoraSettings(rank=2, alpha=4.0)


def scored(learner, batch, *columns):
    return learner.score(whole(batch), frozenset(columns))[0]


def test_logprobs_and_entropy_equal_the_plain_model(qwen):
    from transformers import AutoModelForCausalLM

    batch = some_batch(share_prompts=False)
    batch.distribution = Distribution(temperature=0.7)
    found = scored(worker(qwen), batch, "logprobs", "entropy")
    plain = AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.float64, attn_implementation="eager")
    for sequence in range(batch.sequences):
        here = batch.sequence == sequence
        tokens, trained = batch.tokens[here], batch.trained[here][1:]
        with torch.no_grad():
            rows = (plain(tokens[None]).logits[0, :-1] / 0.7).log_softmax(-1)
        logprobs = rows.gather(1, tokens[1:, None])[:, 0]
        entropy = -(rows.exp() * rows).sum(-1)
        torch.testing.assert_close(found["logprobs"][here][1:], logprobs * trained, atol=1e-6, rtol=0)
        torch.testing.assert_close(found["entropy"][here][1:], entropy * trained, atol=1e-6, rtol=0)
    assert found["logprobs"].dtype == torch.float64
    assert not found["logprobs"][~batch.trained].any()


def test_scores_do_not_depend_on_micro_batches_and_leave_no_gradient(qwen):
    learner, batch = worker(qwen), some_batch()
    expected = scored(learner, batch, "logprobs")["logprobs"]
    found = torch.zeros_like(expected)
    micro = cut(batch, 16)
    for one, columns in zip(micro, learner.score(micro, frozenset({"logprobs"})), strict=True):
        found[one.tokens[one.batch.trained]] = columns["logprobs"][one.batch.trained]
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert all(p.grad is None for p in learner.model.parameters())


def test_topk_scores_the_teachers_tokens(qwen):
    batch = some_batch()
    batch.fill("topk_ids", torch.stack([batch.tokens, (batch.tokens + 1) % 32], dim=1))
    found = scored(worker(qwen), batch, "topk", "logprobs")
    assert found["topk"].shape == (len(batch), 2)
    torch.testing.assert_close(found["topk"][:, 0], found["logprobs"])
    assert not found["topk"][~batch.trained].any()


def test_likeliest_tokens_are_scored_as_given_ones_are(qwen):
    batch, learner = some_batch(), worker(qwen)
    micro = cut(batch, 16)
    for one, found in zip(micro, learner.score(micro, {"topk_ids", "topk"}, Top(3, 30)), strict=True):
        assert found.keys() == {"topk_ids", "topk"}
        assert found["topk_ids"].max() < 30
        one.batch.fill("topk_ids", found["topk_ids"])
        torch.testing.assert_close(scored(learner, one.batch, "topk")["topk"], found["topk"])
        assert not found["topk"][~one.batch.trained].any()
    assert scored(learner, batch, "logprobs").keys() == {"logprobs"}
    with pytest.raises(WhetError, match="requested without their number"):
        scored(learner, batch, "topk_ids")


def test_values_are_read_at_the_predictor(qwen):
    learner = worker(qwen, head="value")
    batch = some_batch()
    changed = copy.deepcopy(batch)
    last = int(batch.trained.nonzero().max())
    changed.tokens[last] = (changed.tokens[last] + 1) % 32
    values, other = scored(learner, batch, "values")["values"], scored(learner, changed, "values")["values"]
    assert values[batch.trained].unique().numel() > 1
    torch.testing.assert_close(values, other)
    with pytest.raises(WhetError, match="value head"):
        scored(learner, batch, "logprobs")
    with pytest.raises(WhetError, match="language head"):
        scored(worker(qwen), batch, "values")


@pytest.mark.parametrize("lora", [None, LORA], ids=["copy", "adapter off"])
@pytest.mark.parametrize("precision", ["float64", "float32", "bfloat16"])
def test_reference_logprobs_are_those_of_the_start(qwen, lora, precision):
    learner = worker(qwen, lora=lora, precision=precision)
    batch = some_batch()
    at_start = scored(learner, batch, "logprobs")["logprobs"]
    for step in range(3):
        learner.update(whole(some_batch(step)), PolicyGradient())
    found = scored(learner, batch, "logprobs", "reference_logprobs")
    assert torch.equal(found["reference_logprobs"], at_start)
    assert not torch.allclose(found["logprobs"], at_start, atol=1e-3)


def test_the_reference_is_loaded_only_when_asked_for_and_never_under_lora(qwen):
    full, lora = worker(qwen), worker(qwen, lora=LORA)
    scored(full, some_batch(), "logprobs")
    assert full.reference is None
    for learner in (full, lora):
        scored(learner, some_batch(), "reference_logprobs")
    assert full.reference is not None
    assert lora.reference is None


def test_scoring_the_reference_trains_no_adapter_that_is_frozen(qwen):
    learner = worker(qwen, lora=LORA)
    for name, parameter in learner.module.by_name():
        parameter.requires_grad_("lora_B" in name)
    scored(learner, some_batch(), "reference_logprobs")
    assert {name for name, p in learner.module.by_name() if p.requires_grad} == {
        name for name in weights(learner) if "lora_B" in name
    }


def test_a_learner_without_an_optimizer_scores_and_refuses_to_update(qwen):
    frozen, trained = worker(qwen, optimizer=None, precision="bfloat16"), worker(qwen, precision="bfloat16")
    assert_same(scored(frozen, some_batch(), "logprobs"), scored(trained, some_batch(), "logprobs"))
    assert not any(p.requires_grad for p in frozen.model.parameters())
    with pytest.raises(WhetError, match="no optimizer"):
        frozen.update(whole(some_batch()), PolicyGradient())


def test_lora_leaves_the_base_untouched(llama):
    learner = worker(llama, lora=LORA)
    before = weights(learner)
    for step in range(2):
        learner.update(whole(some_batch(step)), PolicyGradient())
    after = weights(learner)
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert moved
    assert moved == {name for name in after if "lora_" in name}


@pytest.mark.parametrize("tied", [False, True])
def test_named_weights_equal_the_merged_model_and_merge_nothing(llama, qwen, tied):
    if Chosen.type == "megatron":
        pytest.skip("PEFT can't merge Megatron Core's layers; tests/parallel compares what they publish with torch's")
    learner = worker(qwen if tied else llama, lora=LORA, precision="float32")
    learner.update(whole(some_batch()), PolicyGradient())
    before = weights(learner)
    found = {name: tensor.clone() for name, tensor in published(learner).items()}
    assert_same(before, weights(learner))
    merged = copy.deepcopy(learner.model).merge_and_unload()
    assert_close(dict(merged.state_dict()), found, tolerance=1e-6)
    assert found["lm_head.weight"].shape == found["model.embed_tokens.weight"].shape
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"]) == tied


def test_named_weights_without_lora_are_the_models_own(qwen):
    learner = worker(qwen, precision="float32")
    found = published(learner)
    assert found["lm_head.weight"].data_ptr() == learner.model.lm_head.weight.data_ptr()
    assert "lm_head.weight" in found
    assert all(not tensor.requires_grad for tensor in found.values())


def test_dropout_depends_on_seed_and_step_alone(qwen):
    lora = LoraSettings(rank=2, alpha=4.0, dropout=0.5)
    one, two = worker(qwen, lora=lora), worker(qwen, lora=lora)
    state = torch.random.get_rng_state()
    one.update(whole(some_batch()), PolicyGradient())
    assert torch.equal(state, torch.random.get_rng_state())
    torch.rand(7)
    two.update(whole(some_batch()), PolicyGradient())
    assert_same(weights(one), weights(two))


def test_a_batch_laid_out_whole_is_scored_like_one_with_shared_prompts(qwen):
    learner = worker(qwen)
    shared: Batch = some_batch()
    separate = some_batch(share_prompts=False)
    a = scored(learner, shared, "logprobs")["logprobs"][shared.trained]
    b = scored(learner, separate, "logprobs")["logprobs"][separate.trained]
    torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
