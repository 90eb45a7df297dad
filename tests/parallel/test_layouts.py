"""However a model, its data and its tokens are spread over ranks, it learns the same as in one process.

Everything is float64, with batches of shared prompts in several micro-batches, clipped gradients and AdamW. Norms
inside transformers compute in float32 even then, token by token, so that this rounding is the same on both sides.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.parallel.cases import ENOUGH, Case, Said, build, score, score_all, train, train_all
from tests.parallel.ranks import on_ranks
from whet.parallel.config import ParallelConfig
from whet.parallel.parameters import local
from whet.types import Distribution

FSDP, TENSOR, CONTEXT, BOTH = {"fsdp": 2}, {"tensor": 2}, {"context": 2}, {"fsdp": 2, "tensor": 2}
TOP_P = Distribution(temperature=0.7, top_p=0.9)

QUICK = {
    "fsdp": ("llama", FSDP, {}),
    "fsdp, lora": ("qwen", FSDP, {"lora": True}),
    "tensor": ("qwen", TENSOR, {"distribution": TOP_P}),
    "tensor, entropy": ("llama", TENSOR, {"loss": "entropy"}),
    "tensor, lora": ("qwen", TENSOR, {"lora": True}),
    "context": ("qwen", CONTEXT, {}),
    "context, lora": ("llama", CONTEXT, {"lora": True}),
}
"""Two ranks: model, layout, and what is changed of a ``Case``."""

THOROUGH_2 = {
    "fsdp, qwen": ("qwen", FSDP, {"distribution": TOP_P}),
    "fsdp, value": ("qwen", FSDP, {"loss": "value"}),
    "fsdp, offload": ("llama", FSDP | {"cpu_offload": True}, {}),
    "fsdp, an idle rank": ("llama", FSDP, {"max_tokens": ENOUGH, "groups": 1}),
    "fsdp, recomputed": ("llama", FSDP, {"learner": {"activation_checkpointing": True}}),
    "replicas": ("llama", {"replicas": 2}, {}),
    "tensor, value": ("llama", TENSOR, {"loss": "value"}),
    "tensor, no sequence": ("qwen", TENSOR | {"sequence_parallel": False}, {}),
    "tensor, no sequence, lora": ("llama", TENSOR | {"sequence_parallel": False}, {"lora": True}),
    "tensor, recomputed": ("qwen", TENSOR, {"learner": {"activation_checkpointing": True}}),
    "context, entropy": ("llama", CONTEXT, {"loss": "entropy"}),
    "context, value": ("llama", CONTEXT, {"loss": "value"}),
    "context, recomputed": ("qwen", CONTEXT, {"learner": {"activation_checkpointing": True}}),
}
THOROUGH_4 = {
    "replicas and fsdp": ("qwen", {"replicas": 2, "fsdp": 2}, {}),
    "replicas and fsdp, lora": ("llama", {"replicas": 2, "fsdp": 2}, {"lora": True}),
    "fsdp 4": ("llama", {"fsdp": 4}, {}),
    "tensor and fsdp": ("qwen", BOTH, {}),
    "tensor and fsdp, llama": ("llama", BOTH, {"distribution": TOP_P, "loss": "entropy"}),
    "tensor and fsdp, lora": ("qwen", BOTH, {"lora": True}),
    "tensor and fsdp, lora, recomputed": (
        "llama",
        BOTH,
        {"lora": True, "learner": {"activation_checkpointing": True}},
    ),
    "tensor and fsdp, value": ("qwen", BOTH, {"loss": "value"}),
    "tensor and fsdp, recomputed, offload": (
        "llama",
        BOTH | {"cpu_offload": True},
        {"learner": {"activation_checkpointing": True}},
    ),
    "context and fsdp": ("llama", {"context": 2, "fsdp": 2}, {}),
    "context and tensor": ("qwen", {"context": 2, "tensor": 2}, {"lora": True}),
    "context 4": ("llama", {"context": 4}, {}),
}
FLOAT32 = {
    f"{model}, {' and '.join(layout)}": (model, layout, {"learner": {"precision": "float32"}})
    for model in ("llama", "qwen")
    for layout in (FSDP, TENSOR, CONTEXT)
}
GEMMA = {"tensor": ("gemma", TENSOR, {}), "context": ("gemma", CONTEXT, {}), "lora": ("gemma", FSDP, {"lora": True})}


def check(
    models: dict[str, Path], table: dict[str, tuple[str, dict, dict]], tolerance: float = 1e-12, cut: bool = False
) -> None:
    """All cases of a table in one group of ranks, each against one process. The tolerance is that of sums in another
    order, as a share of the largest number. ``cut``: the one process has the same micro-batches."""
    cases = {}
    for name, (model, layout, more) in table.items():
        size = ParallelConfig(**layout)
        shards = size.ranks // size.ranks_per_shard
        cases[name] = Case(models[model], layout, **{"groups": 3 * shards} | more)  # two micro-batches for each shard
    ranks = {case.ranks for case in cases.values()}
    said = on_ranks(ranks.pop(), train_all, list(cases.values()))
    assert not ranks
    wrong = {}
    for index, (name, case) in enumerate(cases.items()):
        alone = replace(case, parallel={}) if cut else case.one_rank()
        found = list(differences(train("", 0, alone), [rank[index] for rank in said], case, tolerance))
        if found:
            wrong[name] = found
    assert not wrong


def test_a_reference_stays_what_the_learner_was(models):
    """So that the columns that are compared below are worth comparing."""
    one = train("", 0, Case(models["llama"]).one_rank())
    before, after = one.scored, one.scored_after
    assert torch.equal(before["reference_logprobs"], after["reference_logprobs"])
    assert not torch.allclose(before["logprobs"], after["logprobs"], atol=1e-3)


def differences(one: Said, many: list[Said], case: Case, tolerance: float) -> Iterator[str]:
    speakers = many[:: ParallelConfig(**case.parallel).ranks_per_shard]  # one for each shard of the data
    for when in ("scored", "scored_after"):
        columns = {name: sum(getattr(said, when)[name] for said in speakers) for name in one.scored}
        yield from far(when, getattr(one, when), columns, tolerance)
    for what in ("gradients", "weights"):
        assert set().union(*(getattr(said, what) for said in many)) == getattr(one, what).keys()
    losses = [sum(parts) for parts in zip(*(said.losses for said in speakers), strict=True)]
    assert losses == pytest.approx(one.losses, rel=tolerance)
    for said in many:
        assert said.norms == pytest.approx(one.norms, rel=tolerance)
        assert said.norms == many[0].norms  # to the last bit: ranks must never decide differently
        assert said.described | {"ranks": 1} == one.described
        yield from far("gradient", some(one.gradients, said.gradients), said.gradients, tolerance)
        yield from far("weight", some(one.weights, said.weights), said.weights, tolerance)
        yield from far("published weight", one.published, said.published, tolerance)


def some(expected: dict[str, Tensor], of: dict[str, Tensor]) -> dict[str, Tensor]:
    """What is ``of`` one rank: of a pipeline's, not all layers."""
    return {name: tensor for name, tensor in expected.items() if name in of}


def far(what: str, expected: dict[str, Tensor], found: dict[str, Tensor], tolerance: float) -> Iterator[str]:
    assert expected.keys() == found.keys()
    scale = max(float(tensor.abs().max()) for tensor in expected.values())
    for name in expected:
        error = float((expected[name] - found[name]).abs().max()) / scale
        if not error <= tolerance:
            yield f"{what} {name}: {error:.1e}"


def test_two_ranks_learn_the_same_as_one(models):
    check(models, QUICK)


@pytest.mark.slow
def test_two_ranks_learn_the_same_as_one_in_every_setting(models):
    check(models, THOROUGH_2)


@pytest.mark.slow
def test_four_ranks_learn_the_same_as_one(models):
    check(models, THOROUGH_4)


@pytest.mark.slow
def test_two_ranks_learn_nearly_the_same_where_numbers_are_float32(models):
    check(models, FLOAT32, 5e-6)
    check(models, GEMMA, 2e-5)


@pytest.mark.slow
def test_bfloat16_scores_the_same_and_is_as_exact_as_in_one_process(models):
    """Matrices that travel in bfloat16 are the ones that autocast would have rounded."""
    narrow = {"precision": "bfloat16"}
    cases = [Case(models["qwen"], layout, learner=narrow) for layout in (FSDP, TENSOR, CONTEXT)]
    spread = on_ranks(2, train_all, cases)[0]
    exact, alone = train("", 0, Case(models["qwen"])), train("", 0, Case(models["qwen"], learner=narrow))

    def error(said: Said) -> float:
        squares = [((said.gradients[name] - g) ** 2).sum() / (g**2).sum() for name, g in exact.gradients.items()]
        return float(max(squares)) ** 0.5

    assert 0.001 < error(alone) < 0.1
    assert all(error(said) < 1.5 * error(alone) for said in spread)
    for name, column in alone.scored.items():
        there = spread[0].scored[name] != 0  # this shard's tokens
        assert there.any()
        assert torch.equal(spread[0].scored[name][there], column[there])


@pytest.mark.slow
def test_what_only_scores_is_spread_too(models):
    """A teacher, a frozen reward model."""
    layouts = [FSDP | {"cpu_offload": True}, TENSOR, CONTEXT, {"pipeline": 2}]
    cases = [
        Case(models["qwen"], layout, loss=loss, trains=False) for layout in layouts for loss in ("policy", "value")
    ]
    said = on_ranks(2, score_all, cases)
    for index, case in enumerate(cases):
        speakers = said[:: ParallelConfig(**case.parallel).ranks_per_shard]
        for name, expected in score(case.one_rank(), build(case.one_rank(), "", 0)).items():
            together = sum(answers[index][name] for answers in speakers)
            assert not list(far(name, {name: expected}, {name: together}, 1e-12))


def held(rendezvous: str, rank: int, cases: list[Case]) -> list[int]:
    """Numbers that this rank keeps of all parameters."""
    return [sum(local(p).numel() for p in build(case, rendezvous, rank)._parameters()) for case in cases]


@pytest.mark.slow
def test_every_rank_keeps_only_its_part(models):
    layouts = {"fsdp": 4}, {"fsdp": 2, "tensor": 2}, {"context": 2, "fsdp": 2}, {"replicas": 2, "fsdp": 2}
    cases = [Case(models["qwen"], layout) for layout in layouts]
    [total] = held("", 0, [Case(models["qwen"])])
    quarter, also, with_context, half = (sum(numbers) for numbers in zip(*on_ranks(4, held, cases), strict=True))
    assert (quarter, with_context, half) == (total, total, 2 * total)
    assert total < also < 1.05 * total  # norms are on every rank of a tensor group
