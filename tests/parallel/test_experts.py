"""Mixtures of experts learn the same as in one process, for any layout of experts and tokens. ``test_layouts.py``
describes the batches and the comparison."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from tests.learner.parts import PolicyGradient, assert_close
from tests.parallel.cases import (
    ENOUGH,
    RECOMPUTED,
    TOP_P,
    Case,
    Outputs,
    batch_of,
    build,
    build_errors,
    micro_batches,
    score,
    score_all,
    train,
    train_all,
)
from tests.parallel.comparing import assert_scored_alike, check, deviations, tables
from tests.parallel.ranks import on_ranks
from tests.parallel.saving import assert_weights_unchanged, exported, folders, resume
from tests.parallel.skipping import assert_skipped, skip
from whet.base.errors import WhetError
from whet.models.config import LoraSettings, ModelConfig
from whet.models.loading import load_model
from whet.parallel.config import ParallelConfig
from whet.parallel.parameters import local

EXPERT = {"fsdp": 2, "expert": 2}
BOTH = {"fsdp": 4, "expert": 2}

ADAPTED = {"lora": True, "lora_settings": {"experts": True}}
QUICK = {
    "expert, adapted": ("moe", EXPERT, ADAPTED),
    "expert, in tensor": ("moe", {"tensor": 2, "expert": 2}, {}),
}
THOROUGH_2 = {
    "expert, lora": ("moe", EXPERT, {"lora": True}),
    "fsdp": ("moe", {"fsdp": 2}, {}),
    "expert": ("moe", EXPERT, {}),
    "expert, in tensor, lora": ("moe", {"tensor": 2, "expert": 2}, {"lora": True}),
    "fsdp, lora": ("moe", {"fsdp": 2}, {"lora": True}),
    "fsdp, adapted": ("mixtral", {"fsdp": 2}, ADAPTED),
    "expert, adapted, recomputed": ("mixtral", EXPERT, ADAPTED | {"learner": RECOMPUTED}),
    "expert, in context, adapted": ("moe", {"context": 2, "expert": 2}, ADAPTED),
    "fsdp, recomputed": ("mixtral", {"fsdp": 2}, {"learner": RECOMPUTED}),
    "expert, recomputed": ("moe", EXPERT, {"learner": RECOMPUTED}),
    "expert, lora, recomputed": ("mixtral", EXPERT, {"lora": True, "learner": RECOMPUTED}),
    "expert, offload": ("moe", EXPERT | {"cpu_offload": True}, {}),
    "expert, an idle rank": ("mixtral", EXPERT, {"max_tokens": ENOUGH, "groups": 1}),
    "expert, value": ("moe", EXPERT, {"loss": "value"}),
    "expert, top-p": ("mixtral", EXPERT, {"distribution": TOP_P, "loss": "entropy"}),
    "expert, in context": ("moe", {"context": 2, "expert": 2}, {}),
    "tensor": ("moe", {"tensor": 2}, {"loss": "entropy"}),
    "tensor, lora": ("mixtral", {"tensor": 2}, {"lora": True}),
    "tensor, recomputed": ("mixtral", {"tensor": 2}, {"learner": RECOMPUTED}),
    "expert, in tensor, lora, recomputed": (
        "mixtral",
        {"tensor": 2, "expert": 2},
        {"lora": True, "learner": RECOMPUTED},
    ),
    "replicas": ("moe", {"replicas": 2}, {}),
}
THOROUGH_4 = {
    "fsdp": ("moe", {"fsdp": 4}, {}),
    "fewer experts than ranks": ("two experts", {"fsdp": 4}, {}),
    "expert and fsdp": ("moe", BOTH, {}),
    "expert and fsdp, lora": ("mixtral", BOTH, {"lora": True}),
    "expert and fsdp, adapted": ("moe", BOTH, ADAPTED),
    "expert, fsdp and pipeline, adapted": ("moe", {"pipeline": 2, **EXPERT}, ADAPTED),
    "expert and fsdp, recomputed": ("mixtral", BOTH, {"learner": RECOMPUTED}),
    "an expert of two ranks": ("two experts", BOTH, {}),
    "expert 4": ("moe", {"fsdp": 4, "expert": 4}, {}),
    "expert and replicas": ("moe", {"replicas": 2, **EXPERT}, {}),
    "expert, fsdp and tensor": ("moe", {"fsdp": 2, "tensor": 2, "expert": 2}, {}),
    "expert 4, fsdp and tensor": ("mixtral", {"fsdp": 2, "tensor": 2, "expert": 4}, {"learner": RECOMPUTED}),
    "expert, fsdp and tensor, lora": ("moe", {"fsdp": 2, "tensor": 2, "expert": 2}, {"lora": True}),
    "expert, context and fsdp": ("moe", {"fsdp": 2, "context": 2, "expert": 4}, {"loss": "entropy"}),
    "expert, fsdp and pipeline": ("mixtral", {"pipeline": 2, **EXPERT}, {}),
    "expert, tensor and pipeline": ("mixtral", {"pipeline": 2, "tensor": 2, "expert": 2}, {}),
    "expert, fsdp and pipeline, lora": ("moe", {"pipeline": 2, **EXPERT}, {"lora": True, "learner": RECOMPUTED}),
    "fsdp and tensor": ("mixtral", {"fsdp": 2, "tensor": 2}, {}),
}
IDLE = {"learner": {"balance": 0.02}, "max_tokens": ENOUGH, "groups": 1}
ROUGH = {
    "expert": ("deepseek", EXPERT, {}),
    "expert, lora": ("deepseek", EXPERT, {"lora": True}),
    "fsdp": ("deepseek", {"fsdp": 2}, {"learner": RECOMPUTED}),
    "expert, in context": ("deepseek", {"context": 2, "expert": 2}, {}),
    "experts that no token reaches": ("one-sided", EXPERT, {}),
    "expert, balanced": ("deepseek", EXPERT, {"learner": {"balance": 0.02}}),
    "expert, balanced, lora": ("deepseek", EXPERT, {"lora": True, "learner": {"balance": 0.02}}),
    "expert, balanced, an idle rank": ("deepseek", EXPERT, IDLE),
    "pipeline, balanced": ("deepseek", {"pipeline": 2}, {"learner": {"balance": 0.02}}),
}
"""DeepSeek's router computes in float32, for any dtype of the model."""


@tables(QUICK, THOROUGH_2, THOROUGH_4)
def test_several_ranks_learn_the_same_as_one(models, table):
    check(models, table)


@pytest.mark.slow
def test_the_generators_experts_are_used_on_every_shard(models):
    follows = {"follows_routes": True}
    table = {
        "fsdp": ("moe", {"fsdp": 2}, follows),
        "fsdp, lora, recomputed": ("mixtral", {"fsdp": 2}, follows | {"lora": True, "learner": RECOMPUTED}),
        "replicas": ("mixtral", {"replicas": 2}, follows),
        "expert": ("moe", EXPERT, follows),
        "expert, recomputed": ("mixtral", EXPERT, follows | {"learner": RECOMPUTED}),
        "context": ("moe", {"context": 2}, follows),
        "expert, in context": ("mixtral", {"context": 2, "expert": 2}, follows),
    }
    check(models, table)


def max_loads(rendezvous: str, rank: int, cases: list[Case]) -> list[float]:
    workers = [build(case, rendezvous, rank) for case in cases]
    updates = [w.update(micro_batches(case, w, 0), PolicyGradient()) for case, w in zip(cases, workers, strict=True)]
    return [update.metrics.result()["experts/max_load"] for update in updates]


def test_tokens_that_pad_a_batch_are_no_load_of_an_expert(models):
    alone = Case(models["moe"], learner={"balance": 0.0}, max_tokens=ENOUGH, groups=5)
    assert len(batch_of(alone, 0)) % 2
    (expected,) = max_loads("", 0, [alone])
    cases = [replace(alone, parallel=layout) for layout in ({"context": 2}, {"tensor": 2})]
    assert on_ranks(2, max_loads, cases) == [[expected, expected]] * 2


@pytest.mark.slow
def test_a_router_that_computes_in_float32_learns_nearly_the_same(models):
    check(models, ROUGH, 2e-5)


@pytest.mark.slow
def test_float32_learns_nearly_the_same(models):
    single = {"learner": {"precision": "float32"}, "groups": 12}  # with fewer, AdamW amplifies rounding
    table = {
        "expert": ("moe", EXPERT, single),
        "tensor": ("mixtral", {"tensor": 2}, single),
        "experts that no token reaches": ("one-sided", EXPERT, single),  # other matrix products than in float64
    }
    check(models, table, 5e-6)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["moe", "one-sided"])
def test_bfloat16_scores_the_same_and_is_as_exact_as_in_one_process(models, model):
    narrow = {"precision": "bfloat16"}
    layouts = {"fsdp": 2}, EXPERT
    spread = on_ranks(2, train_all, [Case(models[model], layout, learner=narrow) for layout in layouts])[0]
    exact, alone = train("", 0, Case(models[model])), train("", 0, Case(models[model], learner=narrow))
    errors = [relative_error(outputs, exact) for outputs in (alone, *spread)]
    assert 0.001 < errors[0] < 0.2
    assert all(error < 1.5 * errors[0] for error in errors[1:])
    for outputs in spread:
        assert_scored_alike(alone, outputs)


def relative_error(outputs: Outputs, exact: Outputs) -> float:
    """Return the relative error of all gradients of the first step together."""
    wrong = sum(((outputs.gradients[name] - g) ** 2).sum() for name, g in exact.gradients.items())
    return float(wrong / sum((g**2).sum() for g in exact.gradients.values())) ** 0.5


@pytest.mark.slow
def test_every_rank_keeps_only_its_part(models):
    for name, layouts in {
        "mixtral": [{"fsdp": 4}, BOTH, {"fsdp": 4, "expert": 4}, {"fsdp": 2, "tensor": 2, "expert": 2}],
        "two experts": [{"fsdp": 4}, BOTH, {"tensor": 2, "fsdp": 2}],
    }.items():
        [total] = expert_parameters("", 0, [Case(models[name])])
        for shares in zip(
            *on_ranks(4, expert_parameters, [Case(models[name], layout) for layout in layouts]), strict=True
        ):
            assert shares == (total / 4,) * 4


def expert_parameters(rendezvous: str, rank: int, cases: list[Case]) -> list[int]:
    """Return the number of expert parameters on this rank."""
    workers = [build(case, rendezvous, rank) for case in cases]
    return [sum(local(p).numel() for name, p in w.module.by_name() if ".experts." in name) for w in workers]


@pytest.mark.slow
def test_a_frozen_model_is_split_too(models):
    narrow = {"precision": "bfloat16"}
    for learner, tolerance in (({}, 1e-12), (narrow, 0.0)):
        case = Case(models["moe"], EXPERT, trains=False, learner=learner)
        outputs = [answers[0] for answers in on_ranks(2, score_all, [case])]
        for name, expected in score(case.one_rank(), build(case.one_rank(), "", 0)).items():
            assert not list(deviations(name, {name: expected}, {name: outputs[0][name] + outputs[1][name]}, tolerance))


def test_all_ranks_skip_a_step_that_is_bad_on_one_of_them(models, tmp_path):
    case = Case(models["moe"], EXPERT)
    assert_skipped(on_ranks(2, skip, case, tmp_path), case)


def test_a_learner_resumes_on_one_and_two_ranks_and_one(models, tmp_path):
    """The weights are restored bit for bit, and the steps equal the steps of an uninterrupted learner."""
    first, second = folders(tmp_path, "1", "2")
    single, pair = Case(models["moe"]), Case(models["moe"], EXPERT)
    _, uninterrupted, _ = resume("", 0, single, None, None, range(3))
    outputs = [resume("", 0, single, None, first, range(1)), on_ranks(2, resume, pair, first, second, range(1, 3))[0]]
    outputs.append(resume("", 0, single, second, None, range(0)))
    assert_weights_unchanged(outputs)
    assert_close(uninterrupted, outputs[-1][1], 1e-12)


@pytest.mark.slow
def test_a_learner_resumes_with_other_layouts(models, tmp_path):
    first, second, third = folders(tmp_path, "2", "4", "tensor")
    layouts = BOTH, {"fsdp": 2, "tensor": 2, "expert": 2}, {"fsdp": 4}
    cases = [Case(models["two experts"], layout) for layout in layouts]
    outputs = [on_ranks(4, resume, cases[0], None, first, range(1))[0]]
    outputs.append(on_ranks(4, resume, cases[1], first, second, range(1, 2))[0])
    outputs.append(on_ranks(4, resume, cases[2], second, third, range(2, 3))[0])
    outputs.append(resume("", 0, cases[0].one_rank(), third, None, range(0)))
    assert_weights_unchanged(outputs)


@pytest.mark.slow
def test_files_of_several_ranks_are_exported_to_one_model_folder(models, tmp_path):
    """The experts have the names of their family's checkpoints."""
    out, weights = exported(Case(models["moe"], EXPERT), tmp_path)
    written = load_file(out / "model.safetensors")
    inside = "model.layers.1.mlp.experts"
    assert torch.equal(written[f"{inside}.3.down_proj.weight"], weights[f"{inside}.down_proj"][3])
    assert torch.equal(written[f"{inside}.2.up_proj.weight"], weights[f"{inside}.gate_up_proj"][2].chunk(2)[1])


def test_a_model_that_cannot_be_split_is_refused_on_every_rank(models):
    cases = [
        Case(models["llama"], EXPERT),
        Case(models["deepseek"], {"tensor": 2}),
        Case(models["moe"], {"tensor": 2, "sequence_parallel": False}),
    ]
    for messages in on_ranks(2, build_errors, cases):
        assert "LlamaModel has no experts to split; set parallel.expert to 1" in messages[0]
        assert "its tensor-parallel plan does not include" in messages[1]
        assert "parallel.sequence_parallel must be true" in messages[2]


@pytest.mark.slow
def test_a_size_that_does_not_divide_the_experts_is_refused(models):
    odd = [Case(models["two experts"], {"fsdp": 4, "expert": 4})]
    assert all(
        "does not divide the 2 experts of MixtralModel" in messages[0] for messages in on_ranks(4, build_errors, odd)
    )


def test_expert_parallelism_uses_ranks_of_other_dimensions():
    assert ParallelConfig(fsdp=2, context=2, tensor=2, replicas=3, expert=8).ranks == 24
    with pytest.raises(ValueError, match="expert = 4 does not divide fsdp x context x tensor = 2"):
        ParallelConfig(fsdp=2, replicas=2, expert=4)


def test_adapters_are_not_added_to_experts(models):
    def adapted(targets: object) -> set[str]:
        config = ModelConfig(path=str(models["moe"]), lora=LoraSettings(rank=2, target_modules=targets))
        names = (name for name, _ in load_model(config, dtype=torch.float32).named_parameters())
        return {name.split(".lora_")[0].rpartition(".")[2] for name in names if ".lora_" in name}

    assert adapted("all-linear") == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert adapted(["q_proj"]) == {"q_proj"}
    with pytest.raises(WhetError, match="up_proj are, or have the names of, layers of routed experts"):
        adapted(["q_proj", "up_proj"])


@pytest.mark.slow
def test_adapted_experts_under_tensor_parallelism_are_refused(models):
    case = Case(models["moe"], {"tensor": 2}, **ADAPTED)
    for message in on_ranks(2, build_errors, [case]):
        assert "model.lora.experts = true adapts experts, whose tokens parallel.tensor splits over ranks" in message[0]
