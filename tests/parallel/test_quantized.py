"""LoRA on a model in 4 bits learns the same on several ranks as on one. Runs wherever bitsandbytes is installed."""

import pytest

from tests.parallel.cases import RECOMPUTED, Case
from tests.parallel.comparing import check, tables
from tests.parallel.saving import assert_passes_through_one_rank

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install 'whet[qlora]'")
NF4 = {"lora": True, "lora_settings": {"quantize": "nf4"}}

QUICK = {
    "fsdp": ("qwen", {"fsdp": 2}, NF4),
}
THOROUGH_2 = {
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
    "pipeline and fsdp": ("qwen", {"pipeline": 2, "fsdp": 2}, NF4),
}


@tables(QUICK, THOROUGH_2, THOROUGH_4)
def test_several_ranks_learn_the_same_as_one(models, table):
    check(models, table)


@pytest.mark.slow
def test_a_checkpoint_of_four_ranks_passes_through_one_rank_unchanged(models, tmp_path):
    assert_passes_through_one_rank(Case(models["qwen"], {"pipeline": 2, "fsdp": 2}, **NF4), tmp_path)
