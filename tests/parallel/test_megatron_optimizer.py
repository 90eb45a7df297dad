"""Megatron Core's distributed optimizer learns the same as AdamW of one process, and resumes on other ranks."""

import pytest
import torch

from tests.learner.parts import PolicyGradient, assert_close
from tests.parallel.cases import ENOUGH, RECOMPUTED, Case, build, build_errors, micro_batches
from tests.parallel.comparing import check, tables
from tests.parallel.ranks import on_ranks
from tests.parallel.saving import (
    assert_passes_through_one_rank,
    assert_same_files,
    assert_weights_unchanged,
    folders,
    load_error,
    resume,
    save_twice,
)
from tests.parallel.skipping import assert_skipped, skip
from whet.learner.config import LearnerConfig
from whet.parallel.config import ParallelConfig

pytest.importorskip("megatron.core", reason="needs Megatron Core: pip install 'whet[megatron]'")

LEARNER = {"type": "megatron", "distributed_optimizer": True, "precision": "float32"}
OPTIMIZER = {"eps": 1e-4}
"""With the default, AdamW multiplies the rounding of gradients that are almost 0 by a thousand."""
SHARED = {"learner": LEARNER, "optimizer": OPTIMIZER}
FLOAT32 = {"learner": {"precision": "float32"}, "optimizer": OPTIMIZER}
ROUNDING = 2e-6
"""Of sums in float32 in another order, relative to the largest number: 6.5e-7 at most."""
FSDP, TENSOR, PIPELINE, CONTEXT, EXPERT = ({size: 2} for size in ("fsdp", "tensor", "pipeline", "context", "expert"))
LORA, VALUE = SHARED | {"lora": True}, SHARED | {"loss": "value"}
LAST_LAYER = {"target_modules": ["layers.1.mlp.up_proj"]}

QUICK = {
    "tied": ("qwen", FSDP, SHARED),
}
TWO = {
    "experts": ("moe", FSDP, SHARED),
    "lora": ("llama", FSDP, LORA),
    "untied": ("llama", FSDP, SHARED),
    "value": ("qwen", FSDP, VALUE),
    "context": ("llama", CONTEXT, SHARED),
    "joined biases": ("qwen2", FSDP, SHARED),
    "expert": ("mixtral", FSDP | EXPERT, SHARED),
    "an idle rank": ("llama", FSDP, SHARED | {"max_tokens": ENOUGH, "groups": 1}),
    "recomputed": ("qwen", FSDP, SHARED | {"learner": LEARNER | RECOMPUTED}),
    "latent attention": ("deepseek, dense", FSDP, SHARED),
    "images": ("qwen2_5_vl", FSDP, SHARED | {"vision": "trained"}),
    "images, frozen": ("qwen2_5_vl", FSDP, SHARED | {"vision": "frozen"}),
}
FOUR = {
    "four": ("llama", {"fsdp": 4}, SHARED),
    "tensor": ("qwen", FSDP | TENSOR, SHARED),
    "pipeline": ("qwen", FSDP | PIPELINE, SHARED),
    "pipeline, interleaved": ("qwen of 4", FSDP | PIPELINE | {"stages_per_rank": 2}, SHARED),
    "pipeline, value": ("qwen", FSDP | PIPELINE, VALUE),
    "pipeline, lora": ("llama", FSDP | PIPELINE, LORA),
    "pipeline, images": ("qwen3_vl", FSDP | PIPELINE, SHARED | {"vision": "trained"}),
    "interleaved, images": ("idefics3 of 4", FSDP | PIPELINE | {"stages_per_rank": 2}, SHARED | {"vision": "trained"}),
    "pipeline and context": ("llama", CONTEXT | PIPELINE, SHARED),
    "replicas": ("llama", FSDP | {"replicas": 2}, SHARED),
    "experts, tensor": ("moe", FSDP | TENSOR, SHARED),
    "expert, tensor": ("moe", FSDP | TENSOR | EXPERT, SHARED),
    "experts, replicas": ("moe", FSDP | {"replicas": 2}, SHARED),
    "expert, pipeline, an idle rank": (
        "mixtral",
        FSDP | EXPERT | PIPELINE,
        SHARED | {"max_tokens": ENOUGH, "groups": 1},
    ),
    "expert, replicas": ("moe", FSDP | EXPERT | {"replicas": 2}, SHARED),
    "latent attention, tensor": ("deepseek, dense", FSDP | TENSOR, SHARED),
    "images and experts, pipeline": ("qwen3_vl_moe", FSDP | PIPELINE, SHARED | {"vision": "trained"}),
    "lora, pipeline, none at the first stage": ("llama", FSDP | PIPELINE, LORA | {"lora_settings": LAST_LAYER}),
}


@tables(QUICK, TWO, FOUR)
def test_it_learns_the_same_as_one_process(models, table):
    check(models, table, ROUNDING)


def tied_weights(rendezvous: str, rank: int, case: Case) -> list[torch.Tensor]:
    """Return the embeddings on this rank after some steps."""
    worker = build(case, rendezvous, rank)
    for step in range(6):
        worker.update(micro_batches(case, worker, step), PolicyGradient())
    pipeline = worker.module.pipeline
    assert pipeline is not None
    assert pipeline.tied is not None
    return [pipeline.tied.detach().clone()]


@pytest.mark.slow
def test_tied_embeddings_of_two_stages_stay_equal_to_the_last_bit(models):
    first, *others = on_ranks(4, tied_weights, Case(models["qwen"], FSDP | PIPELINE, **SHARED))
    assert all(torch.equal(first[0], other[0]) for other in others)


@pytest.mark.parametrize("layout", [FSDP, pytest.param(FSDP | TENSOR, marks=pytest.mark.slow)], ids=["two", "four"])
def test_a_resumed_learner_equals_an_uninterrupted_one_to_the_last_bit(models, tmp_path, layout):
    case, [folder] = Case(models["qwen"], layout, **SHARED), folders(tmp_path, "saved")
    uninterrupted = on_ranks(case.ranks, resume, case, None, None, range(2))
    on_ranks(case.ranks, resume, case, None, folder, range(1))
    resumed = on_ranks(case.ranks, resume, case, folder, None, range(1, 2))
    for (_, expected, _), (_, found, step) in zip(uninterrupted, resumed, strict=True):
        assert step == 2
        assert all(torch.equal(expected[name], found[name]) for name in expected | found)


CHAIN = [({}, FLOAT32), (FSDP, SHARED), (FSDP | TENSOR, SHARED), (FSDP, FLOAT32), ({"fsdp": 4}, SHARED)]


@pytest.mark.slow
def test_a_checkpoint_resumes_on_other_ranks_and_with_other_learners(models, tmp_path):
    cases = [Case(models["qwen"], layout, **more) for layout, more in CHAIN]
    _, uninterrupted, _ = resume("", 0, cases[0], None, None, range(len(cases)))
    source, outputs = None, []
    for step, (case, folder) in enumerate(zip(cases, folders(tmp_path, *"12345"), strict=True)):
        steps = range(step, step + 1)
        if case.ranks == 1:
            outputs.append(resume("", 0, case, source, folder, steps))
        else:
            outputs.append(on_ranks(case.ranks, resume, case, source, folder, steps)[0])
        source = folder
    assert_weights_unchanged(outputs)
    assert_close(uninterrupted, outputs[-1][1], ROUNDING)


MIXED = {
    "tied": ("qwen", FSDP | PIPELINE, SHARED),
    "experts": ("moe", FSDP | TENSOR | EXPERT, SHARED),
    "joined biases": ("qwen2", {"fsdp": 4}, SHARED),
    "lora": ("llama", FSDP | {"replicas": 2}, LORA),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXED)
def test_a_checkpoint_passes_through_one_process_of_torch_unchanged(models, tmp_path, name):
    model, layout, more = MIXED[name]
    assert_passes_through_one_rank(Case(models[model], layout, **more), tmp_path)


@pytest.mark.slow
def test_saving_during_training_writes_the_same(models, tmp_path):
    at_once, meanwhile = folders(tmp_path, "at once", "meanwhile")
    on_ranks(2, save_twice, Case(models["qwen"], FSDP, **SHARED), at_once, meanwhile)
    assert_same_files(at_once, meanwhile)


@pytest.mark.slow
def test_all_ranks_skip_a_step_that_is_bad_on_one_of_them(models, tmp_path):
    case = Case(models["qwen"], FSDP | TENSOR, **SHARED)
    assert_skipped(on_ranks(4, skip, case, tmp_path), case, ROUNDING)


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(models, tmp_path):
    resume("", 0, Case(models["llama"], **FLOAT32), None, tmp_path, range(1))
    for message, unchanged in on_ranks(2, load_error, Case(models["qwen"], FSDP, **SHARED), tmp_path):
        assert "lm_head.weight is not of this model" in message
        assert unchanged


def moments(rendezvous: str, rank: int, cases: list[Case]) -> list[tuple[int, int]]:
    """Return the numbers of moments on this rank, and the bytes of gradients that are left after a step."""
    found = []
    for case in cases:
        worker = build(case, rendezvous, rank)
        worker.update(micro_batches(case, worker, 0), PolicyGradient())
        assert worker.optimizer is not None
        states = worker.optimizer.state.values()
        left = sum(p.main_grad.untyped_storage().nbytes() for p in worker.module.parameters())
        found.append((sum(state[kind].numel() for state in states for kind in ("exp_avg", "exp_avg_sq")), left))
    return found


def test_each_rank_has_its_share_of_the_moments_and_frees_the_gradients(models):
    case = Case(models["qwen"], FSDP, **SHARED)
    whole = build(case.one_rank(), "", 0).module.trained_size
    [[(first, _)], [(second, _)]] = found = on_ranks(2, moments, [case])
    assert first + second == 2 * whole
    assert abs(first - second) < 0.05 * whole
    assert [left for [(_, left)] in found] == [0, 0]


@pytest.mark.slow
def test_weights_of_64_bits_are_refused_on_every_rank(models):
    exact = Case(models["qwen"], FSDP, learner=LEARNER | {"precision": "float64"})
    for [message] in on_ranks(2, build_errors, [exact]):
        assert "is for weights in float32, but model.embed_tokens.weight is in torch.float64" in message


@pytest.mark.parametrize(
    ("learner", "parallel", "words"),
    [
        ({"type": "torch"}, FSDP, "is Megatron Core's; set learner.type=megatron"),
        ({}, {"tensor": 2}, "parallel.fsdp and context, but both are 1"),
        ({}, {"replicas": 2}, "parallel.fsdp and context, but both are 1"),
        ({"precision": "float64"}, FSDP, "is for weights in float32, not learner.precision = float64"),
    ],
)
def test_what_it_can_not_be_combined_with(learner, parallel, words):
    config = LearnerConfig(**{"type": "megatron", "distributed_optimizer": True} | learner)
    [problem] = config.problems(ParallelConfig(**parallel), lora=False)
    assert words in problem
    assert not list(LearnerConfig(**LEARNER).problems(ParallelConfig(**CONTEXT), lora=True))
