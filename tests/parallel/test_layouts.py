"""A model learns the same as in one process in any layout of the model, its data and its tokens over ranks.

Everything is float64, with batches of shared prompts in several micro-batches, clipped gradients and AdamW. Norms
inside transformers compute in float32 even then, token by token, so that this rounding is the same on both sides.
"""

import pytest
import torch

from tests.parallel.cases import (
    ENOUGH,
    RECOMPUTED,
    TOP_P,
    Case,
    build,
    parameter_counts,
    score,
    score_all,
    train,
    train_all,
)
from tests.parallel.comparing import assert_scored_alike, check, deviations, tables, worst_error
from tests.parallel.ranks import on_ranks
from whet.parallel.config import ParallelConfig

FSDP, TENSOR, CONTEXT, BOTH = {"fsdp": 2}, {"tensor": 2}, {"context": 2}, {"fsdp": 2, "tensor": 2}
PIPELINE = {"pipeline": 2}
DORA = {"lora": True, "lora_settings": {"dora": True}}

QUICK = {
    "fsdp": ("llama", FSDP, {}),
    "tensor": ("qwen", TENSOR, {"distribution": TOP_P}),
    "context": ("qwen", CONTEXT, {}),
}
"""Two ranks: model, layout, and other fields of a ``Case``."""

THOROUGH_2 = {
    "tensor, dora": ("qwen2", TENSOR, DORA),
    "fsdp, lora": ("qwen", FSDP, {"lora": True}),
    "tensor, entropy": ("llama", TENSOR, {"loss": "entropy"}),
    "context, lora": ("llama", CONTEXT, {"lora": True}),
    "context, dora, recomputed": ("qwen", CONTEXT, DORA | {"learner": RECOMPUTED}),
    "fsdp, qwen": ("qwen", FSDP, {"distribution": TOP_P}),
    "fsdp, dora": ("qwen", FSDP, DORA),
    "tensor, lora": ("qwen", TENSOR, {"lora": True}),
    "tensor, no sequence, dora": ("llama", TENSOR | {"sequence_parallel": False}, DORA),
    "tensor, dora, recomputed": ("qwen", TENSOR, DORA | {"learner": RECOMPUTED}),
    "fsdp, value": ("qwen", FSDP, {"loss": "value"}),
    "fsdp, offload": ("llama", FSDP | {"cpu_offload": True}, {}),
    "fsdp, an idle rank": ("llama", FSDP, {"max_tokens": ENOUGH, "groups": 1}),
    "fsdp, recomputed": ("llama", FSDP, {"learner": RECOMPUTED}),
    "replicas": ("llama", {"replicas": 2}, {}),
    "tensor, value": ("llama", TENSOR, {"loss": "value"}),
    "tensor, no sequence": ("qwen", TENSOR | {"sequence_parallel": False}, {}),
    "tensor, no sequence, lora": ("llama", TENSOR | {"sequence_parallel": False}, {"lora": True}),
    "tensor, recomputed": ("qwen", TENSOR, {"learner": RECOMPUTED}),
    "context, entropy": ("llama", CONTEXT, {"loss": "entropy"}),
    "context, value": ("llama", CONTEXT, {"loss": "value"}),
    "context, recomputed": ("qwen", CONTEXT, {"learner": RECOMPUTED}),
}
THOROUGH_4 = {
    "replicas and fsdp": ("qwen", {"replicas": 2, "fsdp": 2}, {}),
    "replicas and fsdp, lora": ("llama", {"replicas": 2, "fsdp": 2}, {"lora": True}),
    "replicas and fsdp, dora": ("qwen", {"replicas": 2, "fsdp": 2}, DORA),
    "tensor and fsdp, dora": ("qwen", BOTH, DORA),
    "tensor and context, dora": ("llama", CONTEXT | TENSOR, DORA),
    "fsdp 4": ("llama", {"fsdp": 4}, {}),
    "tensor and fsdp": ("qwen", BOTH, {}),
    "tensor and fsdp, llama": ("llama", BOTH, {"distribution": TOP_P, "loss": "entropy"}),
    "tensor and fsdp, lora": ("qwen", BOTH, {"lora": True}),
    "tensor and fsdp, lora, recomputed": ("llama", BOTH, {"lora": True, "learner": RECOMPUTED}),
    "tensor and fsdp, value": ("qwen", BOTH, {"loss": "value"}),
    "tensor and fsdp, recomputed, offload": ("llama", BOTH | {"cpu_offload": True}, {"learner": RECOMPUTED}),
    "context and fsdp": ("llama", {"context": 2, "fsdp": 2}, {}),
    "context and tensor": ("qwen", {"context": 2, "tensor": 2}, {"lora": True}),
    "context 4": ("llama", {"context": 4}, {}),
}
FLOAT32 = {
    f"{model}, {' and '.join(layout)}": (model, layout, {"learner": {"precision": "float32"}})
    for model in ("llama", "qwen")
    for layout in (FSDP, TENSOR, CONTEXT)
}
COMPILED = {
    "fsdp, recomputed": ("qwen", FSDP, {"learner": {"compile": True, "activation_checkpointing": True}}),
    "context, lora": ("llama", CONTEXT, {"lora": True, "learner": {"compile": True}}),
}
IMAGES = {
    "context": ("qwen3_vl", CONTEXT, {"vision": "trained"}),
}
"""One prompt of three has an image, so that some micro-batches have none."""
MORE_IMAGES = {
    "pipeline": ("qwen3_vl", PIPELINE, {"vision": "trained"}),
    "fsdp": ("qwen3_vl", FSDP, {"vision": "trained"}),
    "tensor": ("qwen3_vl", TENSOR, {"vision": "trained"}),
    "an idle rank": ("qwen3_vl", FSDP, {"vision": "trained", "max_tokens": ENOUGH, "groups": 1}),
    "fsdp, frozen, recomputed": ("idefics3", FSDP, {"vision": "frozen", "learner": RECOMPUTED}),
    "fsdp, lora": ("qwen3_vl", FSDP, {"vision": "frozen", "lora": True}),
    "context, recomputed": ("idefics3", CONTEXT, {"vision": "trained", "learner": RECOMPUTED}),
    "context, lora": ("qwen2_5_vl", CONTEXT, {"vision": "frozen", "lora": True}),
    "replicas": ("idefics3", {"replicas": 2}, {"vision": "trained"}),
    "pipeline, recomputed": ("idefics3", PIPELINE, {"vision": "trained", "learner": RECOMPUTED}),
    "pipeline, features for later stages": ("qwen3_vl_moe", PIPELINE, {"vision": "trained"}),
    "pipeline, frozen": ("qwen2_5_vl", PIPELINE, {"vision": "frozen"}),
    "pipeline, lora": ("qwen3_vl", PIPELINE, {"vision": "frozen", "lora": True}),
    "pipeline, value": ("qwen3_vl", PIPELINE, {"vision": "trained", "loss": "value"}),
    "interleaved": ("idefics3 of 4", PIPELINE | {"stages_per_rank": 2}, {"vision": "trained"}),
    "interleaved, features for later stages": (
        "qwen3_vl_moe",
        PIPELINE | {"stages_per_rank": 2},
        {"vision": "trained"},
    ),
    "interleaved, features for later stages, frozen, recomputed": (
        "qwen3_vl_moe",
        PIPELINE | {"stages_per_rank": 2},
        {"vision": "frozen", "learner": RECOMPUTED},
    ),
    "pipeline, one micro-batch": ("idefics3", PIPELINE, {"vision": "trained", "max_tokens": ENOUGH}),
    "expert": ("qwen3_vl_moe", FSDP | {"expert": 2}, {"vision": "trained"}),
    "tensor, no sequence": ("qwen2_5_vl", TENSOR | {"sequence_parallel": False}, {"vision": "trained"}),
    "tensor, frozen, recomputed": ("idefics3", TENSOR, {"vision": "frozen", "learner": RECOMPUTED}),
    "tensor, lora": ("qwen3_vl", TENSOR, {"vision": "frozen", "lora": True}),
    "tensor, expert": ("qwen3_vl_moe", TENSOR | {"expert": 2}, {"vision": "trained"}),
}
IMAGES_4 = {
    "tensor and fsdp": ("qwen3_vl", BOTH, {"vision": "trained"}),
    "pipeline and fsdp": ("qwen3_vl", PIPELINE | FSDP, {"vision": "trained"}),
    "pipeline and fsdp, offload": ("idefics3", PIPELINE | FSDP | {"cpu_offload": True}, {"vision": "frozen"}),
    "pipeline over 4": ("qwen3_vl_moe", {"pipeline": 4}, {"vision": "trained"}),
    "pipeline and context": ("qwen3_vl_moe", PIPELINE | CONTEXT, {"vision": "trained"}),
    "pipeline and tensor": ("qwen3_vl_moe", PIPELINE | TENSOR, {"vision": "trained"}),
    "pipeline, fsdp, expert": ("qwen3_vl_moe", PIPELINE | FSDP | {"expert": 2}, {"vision": "trained"}),
    "tensor and replicas": ("idefics3", {"replicas": 2, "tensor": 2}, {"vision": "trained"}),
    "context and tensor": ("qwen3_vl", {"context": 2, "tensor": 2}, {"vision": "trained"}),
    "context, fsdp, expert": ("qwen3_vl_moe", {"context": 2, "fsdp": 2, "expert": 2}, {"vision": "trained"}),
    "tensor, fsdp, expert": ("qwen3_vl_moe", BOTH | {"expert": 2}, {"vision": "trained"}),
}

GEMMA = {
    "tensor": ("gemma", TENSOR, {}),
    "tensor, images": ("gemma3", TENSOR, {"vision": "trained"}),
    "context": ("gemma", CONTEXT, {}),
    "context, images": ("gemma3", CONTEXT, {"vision": "trained"}),
    "pipeline, images": ("gemma3", PIPELINE, {"vision": "trained"}),
    "lora": ("gemma", FSDP, {"lora": True}),
}


def test_a_reference_model_does_not_change(models):
    """Otherwise the comparisons of its log-probs below would say nothing."""
    alone = train("", 0, Case(models["llama"]).one_rank())
    before, after = alone.scored, alone.scored_after
    assert torch.equal(before["reference_logprobs"], after["reference_logprobs"])
    assert not torch.allclose(before["logprobs"], after["logprobs"], atol=1e-3)


@tables(QUICK, THOROUGH_2, THOROUGH_4)
def test_several_ranks_learn_the_same_as_one(models, table):
    check(models, table)


@tables(IMAGES, MORE_IMAGES, IMAGES_4)
def test_several_ranks_learn_the_same_from_images_as_one(models, table):
    """In the same micro-batches: an image is computed once in each, and norms round to float32."""
    check(models, table, 1e-10, cut=True)


@pytest.mark.slow
def test_two_ranks_learn_nearly_the_same_in_float32(models):
    check(models, FLOAT32, 5e-6)
    check(models, GEMMA, 2e-5)


@pytest.mark.slow
def test_compiled_layers_are_as_exact_as_in_one_process(models):
    check(models, COMPILED, 5e-6)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, DORA], ids=["all", "dora"])
def test_bfloat16_scores_the_same_and_is_as_exact_as_in_one_process(models, more):
    """Only matrices that autocast would round are gathered in bfloat16."""
    narrow = {"precision": "bfloat16"}
    cases = [Case(models["qwen"], layout, learner=narrow, **more) for layout in (FSDP, TENSOR, CONTEXT)]
    cases.append(Case(models["qwen"], FSDP, learner=narrow | {"compile": True}, **more))
    spread = on_ranks(2, train_all, cases)[0]
    exact, alone = (train("", 0, Case(models["qwen"], learner=how, **more)) for how in ({}, narrow))

    error = worst_error(alone.gradients, exact.gradients)
    assert 0.001 < error < 0.1
    assert all(worst_error(outputs.gradients, exact.gradients) < 1.5 * error for outputs in spread)
    assert_scored_alike(alone, spread[0])


@pytest.mark.slow
def test_a_frozen_model_is_split_too(models):
    """Such as a teacher or a reward model."""
    layouts = [FSDP | {"cpu_offload": True}, TENSOR, CONTEXT, {"pipeline": 2}]
    cases = [
        Case(models["qwen"], layout, loss=loss, trains=False) for layout in layouts for loss in ("policy", "value")
    ]
    outputs = on_ranks(2, score_all, cases)
    for index, case in enumerate(cases):
        leaders = outputs[:: ParallelConfig(**case.parallel).ranks_per_shard]
        for name, expected in score(case.one_rank(), build(case.one_rank(), "", 0)).items():
            together = sum(answers[index][name] for answers in leaders)
            assert not list(deviations(name, {name: expected}, {name: together}, 1e-12))


@pytest.mark.slow
def test_every_rank_keeps_only_its_part(models):
    layouts = {"fsdp": 4}, {"fsdp": 2, "tensor": 2}, {"context": 2, "fsdp": 2}, {"replicas": 2, "fsdp": 2}
    cases = [Case(models["qwen"], layout) for layout in layouts]
    [total] = parameter_counts("", 0, [Case(models["qwen"])])
    quarter, also, with_context, half = (
        sum(numbers) for numbers in zip(*on_ranks(4, parameter_counts, cases), strict=True)
    )
    assert (quarter, with_context, half) == (total, total, 2 * total)
    assert total < also < 1.05 * total  # norms are on every rank of a tensor group
