"""LoRA on a model in 4 bits learns the same on several ranks as on one. Runs wherever bitsandbytes is installed."""

import pytest
import torch

from tests.learner.parts import assert_same
from tests.parallel.cases import CPU, RECOMPUTED, Case, build, build_errors
from tests.parallel.comparing import check, tables
from tests.parallel.ranks import on_ranks
from tests.parallel.saving import assert_passes_through_one_rank
from whet.models.quantized import quantized_layers
from whet.parallel.parameters import full_tensor, local

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install 'whet[qlora]'")
NF4 = {"lora": True, "lora_settings": {"quantize": "nf4"}}
DORA = {"lora": True, "lora_settings": {"quantize": "nf4", "dora": True}}

QUICK = {
    "tensor, dora": ("wide", {"tensor": 2}, DORA),
}
THOROUGH_2 = {
    "tensor": ("wide", {"tensor": 2}, NF4),
    "fsdp, dora": ("qwen", {"fsdp": 2}, DORA),
    "pipeline, dora": ("llama", {"pipeline": 2}, DORA),
    "fsdp": ("qwen", {"fsdp": 2}, NF4),
    "tensor, no sequence": ("wide", {"tensor": 2, "sequence_parallel": False}, NF4),
    "tensor, recomputed": ("wide", {"tensor": 2}, NF4 | {"learner": RECOMPUTED}),
    "tensor, value": ("wide", {"tensor": 2}, NF4 | {"loss": "value"}),
    "replicas": ("llama", {"replicas": 2}, NF4),
    "context": ("qwen", {"context": 2}, NF4),
    "pipeline": ("llama", {"pipeline": 2}, NF4),
    "offload": ("qwen", {"fsdp": 2, "cpu_offload": True}, NF4),
    "recomputed": ("llama", {"fsdp": 2}, NF4 | {"learner": RECOMPUTED}),
    "value": ("qwen", {"fsdp": 2}, NF4 | {"loss": "value"}),
}
THOROUGH_4 = {
    "replicas and fsdp": ("qwen", {"replicas": 2, "fsdp": 2}, NF4),
    "context and fsdp": ("llama", {"context": 2, "fsdp": 2}, NF4),
    "tensor and fsdp": ("wide", {"tensor": 2, "fsdp": 2}, NF4),
    "tensor and fsdp, dora": ("wide", {"tensor": 2, "fsdp": 2}, DORA),
    "tensor and context": ("wide", {"tensor": 2, "context": 2}, NF4),
    "tensor and pipeline": ("wide", {"tensor": 2, "pipeline": 2}, NF4),
    "tensor, offload": ("wide", {"tensor": 2, "fsdp": 2, "cpu_offload": True}, NF4),
    "pipeline and fsdp": ("qwen", {"pipeline": 2, "fsdp": 2}, NF4),
}


@tables(QUICK, THOROUGH_2, THOROUGH_4)
def test_several_ranks_learn_the_same_as_one(models, table):
    check(models, table)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"pipeline": 2, "fsdp": 2}, {"tensor": 2, "fsdp": 2}], ids=["pipeline", "tensor"])
def test_a_checkpoint_of_four_ranks_passes_through_one_rank_unchanged(models, tmp_path, layout):
    assert_passes_through_one_rank(Case(models["wide"], layout, **NF4), tmp_path)


def restored_weights(rendezvous: str, rank: int, case: Case) -> tuple[dict[str, torch.Tensor], int]:
    """Return the weights of the layers in 4 bits, and how many of them this rank has."""
    layers = quantized_layers(build(case, rendezvous, rank).module.model)
    kept = sum(2 * local(layer.packed).numel() for layer in layers.values())
    return {name: full_tensor(layer.restored(), CPU) for name, layer in layers.items()}, kept


@pytest.mark.slow
def test_ranks_that_split_matrices_have_parts_of_the_weights_of_one_rank(models):
    case = Case(models["wide"], {"tensor": 2}, **NF4)
    expected, whole = restored_weights("", 0, case.one_rank())
    for weights, kept in on_ranks(2, restored_weights, case):
        assert_same(expected, weights)
        assert kept == whole // 2


def test_sizes_whose_blocks_would_be_split_are_refused(models):
    for messages in on_ranks(2, build_errors, [Case(models["qwen"], {"tensor": 2}, **NF4)]):
        assert "parallel.tensor = 2 can't split layers.0.self_attn.q_proj.base_layer, with 16 inputs" in messages[0]
