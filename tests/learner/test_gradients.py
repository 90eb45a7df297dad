"""Gradients do not depend on how a batch is laid out or cut up."""

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.groups import groups as some_groups
from tests.learner.parts import (
    VOCABULARY,
    BestOfGroup,
    PolicyGradient,
    SequenceRatio,
    WithEntropy,
    assert_close,
    assert_layout_does_not_matter,
    assert_same,
    cut,
    gradients,
    some_batch,
    whole,
    worker,
)
from whet.core.batch import Batch
from whet.core.types import Distribution

pytestmark = pytest.mark.usefixtures("learner_type")

LOSSES = [PolicyGradient(), SequenceRatio(), BestOfGroup(), WithEntropy()]


@pytest.fixture
def learner(llama, learner_type):
    return worker(llama)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    groups=some_groups(VOCABULARY),
    loss=st.sampled_from(LOSSES),
    weighting=st.sampled_from(["token", "sequence", "group"]),
    room=st.integers(0, 60),
    order=st.randoms(use_true_random=False),
)
def test_gradient_does_not_change_with_micro_batches_order_packing_or_shared_prompts(
    learner, groups, loss, weighting, room, order
):
    distribution = Distribution(temperature=0.8)

    def laid_out(rows, share_prompts=True):
        return Batch.from_groups(rows, share_prompts=share_prompts, distribution=distribution).weigh(weighting)

    assume(bool(laid_out(groups).trained.any()))
    assert_layout_does_not_matter(learner, groups, loss, laid_out, room, order)


@pytest.mark.parametrize(
    "loss", [PolicyGradient(), SequenceRatio(), WithEntropy()], ids=lambda loss: type(loss).__name__
)
def test_gradient_does_not_change_when_every_sequence_is_a_micro_batch(learner, loss):
    batch = some_batch()
    pieces = cut(batch, 16, loss.unit)
    assert len(pieces) > 2
    assert_close(gradients(learner, whole(batch), loss), gradients(learner, pieces, loss))


def test_gradient_matches_separate_runs_through_the_plain_model(llama):
    """An oracle without forests, packing or chunks: transformers' own forward pass, one sequence at a time."""
    from transformers import AutoModelForCausalLM

    batch = some_batch()
    ours = gradients(worker(llama), whole(batch), PolicyGradient())
    plain = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float64, attn_implementation="eager")
    separate = some_batch(share_prompts=False)
    total = torch.zeros((), dtype=torch.float64)
    for sequence in range(separate.sequences):
        here = separate.sequence == sequence
        tokens, trained, weight = separate.tokens[here], separate.trained[here], separate.weight[here]
        logits = plain(tokens[None]).logits[0].log_softmax(-1)
        for t in range(1, len(tokens)):
            if trained[t]:
                advantage = separate.reward[sequence] - 0.3
                total = total - weight[t] * advantage * logits[t - 1, tokens[t]]
    total.backward()
    assert_close({name: p.grad for name, p in plain.named_parameters()}, ours)


def test_a_row_with_nothing_trained_adds_nothing(learner):
    batch = some_batch()
    without, _ = batch.select((batch.trained_per_sequence > 0).nonzero().squeeze(1))
    assert without.sequences == batch.sequences - 1
    assert_close(gradients(learner, whole(batch), SequenceRatio()), gradients(learner, whole(without), SequenceRatio()))


def test_a_micro_batch_with_nothing_trained_gives_gradients_of_zero(learner):
    batch, _ = some_batch().select(torch.tensor([2]))
    found = gradients(learner, whole(batch), PolicyGradient())
    assert found
    assert all(not gradient.any() for gradient in found.values())


def test_activation_checkpointing_gives_the_same_gradients(llama, learner):
    checkpointed = worker(llama, learner={"activation_checkpointing": True})
    calls = []
    hook = checkpointed.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    batch = some_batch()
    assert_close(
        gradients(learner, whole(batch), PolicyGradient()), gradients(checkpointed, whole(batch), PolicyGradient())
    )
    hook.remove()
    assert len(calls) == 2


def test_gradients_are_the_same_to_the_last_bit_when_computed_twice(llama):
    again = worker(llama, precision="float32")
    micro = cut(some_batch(), 30)
    assert_same(gradients(again, micro, PolicyGradient()), gradients(again, micro, PolicyGradient()))


def test_bfloat16_computes_in_bfloat16_and_keeps_weights_and_gradients_in_float32(llama, learner):
    half = worker(llama, precision="bfloat16")
    seen = []
    hook = half.model.model.layers[0].mlp.up_proj.register_forward_hook(lambda _m, _i, out: seen.append(out.dtype))
    found = gradients(half, whole(some_batch()), PolicyGradient())
    hook.remove()
    assert seen == [torch.bfloat16]
    exact = gradients(learner, whole(some_batch()), PolicyGradient())
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32
        error = (gradient - exact[name]).norm() / exact[name].norm()
        assert error < 0.05, name
