"""However a model, its data and its tokens are spread over ranks, it learns the same as in one process.

Everything is float64, with batches of shared prompts in several micro-batches, clipped gradients and AdamW. Norms
inside transformers compute in float32 even then, token by token, so that this rounding is the same on both sides.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

from tests.parallel.cases import Case, Said, train, train_all
from tests.parallel.ranks import on_ranks
from whet.parallel.config import ParallelConfig
from whet.types import Distribution

TOLERANCE = 1e-12  # of the largest number: float64 sums in another order
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
    "fsdp, an idle rank": ("llama", FSDP, {"max_tokens": 10_000}),
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
    "fsdp 4": ("llama", {"fsdp": 4}, {"max_tokens": 60}),
    "tensor and fsdp": ("qwen", BOTH, {}),
    "tensor and fsdp, llama": ("llama", BOTH, {"distribution": TOP_P, "loss": "entropy"}),
    "tensor and fsdp, lora": ("qwen", BOTH, {"lora": True}),
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


def check(models: dict[str, Path], table: dict[str, tuple[str, dict, dict]]) -> None:
    """All cases of a table in one group of ranks, each against one process."""
    cases = {name: Case(models[model], layout, **more) for name, (model, layout, more) in table.items()}
    ranks = {case.ranks for case in cases.values()}
    said = on_ranks(ranks.pop(), train_all, list(cases.values()))
    assert not ranks
    wrong = {}
    for index, (name, case) in enumerate(cases.items()):
        found = list(differences(train("", 0, case.one_rank()), [rank[index] for rank in said], case))
        if found:
            wrong[name] = found
    assert not wrong


def differences(one: Said, many: list[Said], case: Case) -> Iterator[str]:
    speakers = many[:: ParallelConfig(**case.parallel).ranks_per_shard]  # one for each shard of the data
    for column, expected in one.scored.items():
        yield from far(column, {column: expected}, {column: sum(said.scored[column] for said in speakers)})
    losses = [sum(parts) for parts in zip(*(said.losses for said in speakers), strict=True)]
    assert losses == pytest.approx(one.losses, rel=TOLERANCE)
    for said in many:
        assert said.norms == pytest.approx(one.norms, rel=TOLERANCE)
        assert said.norms == many[0].norms  # to the last bit: ranks must never decide differently
        assert said.described | {"ranks": 1} == one.described
        yield from far("gradient", one.gradients, said.gradients)
        yield from far("weight", one.weights, said.weights)
        yield from far("published weight", one.published, said.published)


def far(what: str, expected: dict[str, Tensor], found: dict[str, Tensor]) -> Iterator[str]:
    assert expected.keys() == found.keys()
    scale = max(float(tensor.abs().max()) for tensor in expected.values())
    for name in expected:
        error = float((expected[name] - found[name]).abs().max()) / scale
        if not error <= TOLERANCE:
            yield f"{what} {name}: {error:.1e}"


def test_two_ranks_learn_the_same_as_one(models):
    check(models, QUICK)


@pytest.mark.slow
def test_two_ranks_learn_the_same_as_one_in_every_setting(models):
    check(models, THOROUGH_2)


@pytest.mark.slow
def test_four_ranks_learn_the_same_as_one(models):
    check(models, THOROUGH_4)
