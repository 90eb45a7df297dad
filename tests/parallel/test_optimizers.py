"""Optimizers other than AdamW, and settings of parameters by name, learn the same on several ranks as on one."""

import pytest

from tests.parallel.cases import Case
from tests.parallel.comparing import check, tables
from tests.parallel.saving import assert_passes_through_one_rank
from whet.learner.config import ELEMENTWISE

MUON = {"optimizer": {"type": "muon"}}
PLAIN = {"optimizer": {"type": "muon", "settings": {"nesterov": False, "adjust_lr_fn": "original"}}}
OWN = {"optimizer": {"type": "tests.learner.test_optimizer_types:Counting"}}
ADAFACTOR = {"optimizer": {"type": "adafactor"}}
CLIPPING = {"optimizer": {"type": "adafactor", "settings": {"d": 1.5, "beta2_decay": -0.5}}}
MATRICES = {"optimizer": {"type": "tests.learner.test_optimizer_types:Whitening"}}
FROZEN = {
    "optimizer": {"groups": ({"match": "embed_tokens|layers.0|norm", "freeze": True}, {"match": "mlp", "lr": 1e-3})}
}
BOTH = {"fsdp": 2, "tensor": 2}

QUICK = {
    "muon, fsdp": ("llama", {"fsdp": 2}, MUON),
    "adafactor, fsdp": ("llama", {"fsdp": 2}, ADAFACTOR),
    "frozen, tensor": ("qwen", {"tensor": 2}, FROZEN),
}
THOROUGH_2 = {
    "muon, tensor": ("qwen", {"tensor": 2}, PLAIN),
    "a class, fsdp": ("qwen", {"fsdp": 2}, OWN),
    "frozen, fsdp": ("llama", {"fsdp": 2}, FROZEN),
    "muon, lora": ("qwen", {"fsdp": 2}, MUON | {"lora": True}),
    "muon, context": ("llama", {"context": 2}, MUON),
    "muon, replicas": ("llama", {"replicas": 2}, PLAIN),
    "muon, offload": ("llama", {"fsdp": 2, "cpu_offload": True}, MUON),
    "muon, experts": ("moe", {"fsdp": 2, "expert": 2}, MUON),
    "muon, pipeline": ("llama", {"pipeline": 2}, MUON),
    "muon, value": ("qwen", {"fsdp": 2}, MUON | {"loss": "value"}),
    "adafactor, tensor": ("qwen", {"tensor": 2}, CLIPPING),
    "adafactor, lora": ("qwen", {"fsdp": 2}, ADAFACTOR | {"lora": True}),
    "adafactor, context": ("llama", {"context": 2}, ADAFACTOR),
    "adafactor, replicas": ("llama", {"replicas": 2}, CLIPPING),
    "adafactor, offload": ("llama", {"fsdp": 2, "cpu_offload": True}, ADAFACTOR),
    "adafactor, experts": ("moe", {"fsdp": 2, "expert": 2}, ADAFACTOR),
    "adafactor, pipeline": ("qwen", {"pipeline": 2}, ADAFACTOR),
    "adafactor, value": ("qwen", {"fsdp": 2}, ADAFACTOR | {"loss": "value"}),
    "a class of matrices, fsdp": ("qwen", {"fsdp": 2}, MATRICES),
    "a class of matrices, tensor": ("llama", {"tensor": 2}, MATRICES),
    "Rprop, fsdp": ("qwen", {"fsdp": 2}, {"optimizer": {"type": "torch.optim:Rprop"}}),
    "Muon, lora": ("qwen", {"fsdp": 2}, {"optimizer": {"type": "torch.optim:Muon"}, "lora": True}),
    **{
        f"{name}, fsdp": ("qwen", {"fsdp": 2}, {"optimizer": {"type": f"torch.optim:{name}"}})
        for name in sorted(ELEMENTWISE)
    },
    "frozen, context": ("llama", {"context": 2}, FROZEN),
    "frozen, replicas": ("llama", {"replicas": 2}, FROZEN),
    "frozen, experts": ("moe", {"fsdp": 2, "expert": 2}, FROZEN),
    "frozen, recomputed": ("llama", {"fsdp": 2}, FROZEN | {"learner": {"activation_checkpointing": True}}),
}
THOROUGH_4 = {
    "muon, tensor and fsdp": ("qwen", BOTH, MUON),
    "muon, replicas and fsdp": ("llama", {"replicas": 2, "fsdp": 2}, MUON),
    "muon, pipeline and fsdp": ("qwen", {"pipeline": 2, "fsdp": 2}, MUON),
    "muon, experts and copies": ("moe", {"fsdp": 4, "expert": 2}, MUON),
    "muon, experts and replicas": ("moe", {"replicas": 2, "fsdp": 2, "expert": 2}, PLAIN),
    "muon, split experts": ("two experts", {"fsdp": 4}, MUON),
    "muon, split experts and copies": ("two experts", {"fsdp": 4, "expert": 2}, MUON),
    "muon, split experts, offload": ("two experts", {"fsdp": 4, "cpu_offload": True}, MUON),
    "muon, tensor, fsdp and experts": ("moe", BOTH | {"expert": 2}, MUON),
    "adafactor, tensor and fsdp": ("qwen", BOTH, ADAFACTOR),
    "adafactor, replicas and fsdp": ("llama", {"replicas": 2, "fsdp": 2}, ADAFACTOR),
    "adafactor, pipeline and fsdp": ("qwen", {"pipeline": 2, "fsdp": 2}, ADAFACTOR),
    "adafactor, tensor, fsdp and experts": ("moe", BOTH | {"expert": 2}, ADAFACTOR),
    "a class of matrices, tensor and fsdp": ("qwen", BOTH, MATRICES),
    "a class, tensor and fsdp": ("qwen", BOTH, OWN),
    "frozen, tensor and fsdp": ("qwen", BOTH, FROZEN),
}


@tables(QUICK, THOROUGH_2, THOROUGH_4)
def test_several_ranks_learn_the_same_as_one(models, table):
    check(models, table)


PIPELINE = {"pipeline": 2, "fsdp": 2}
SAVED = {
    "muon": ("qwen", BOTH, MUON),
    "muon, pipeline": ("qwen", PIPELINE, MUON),
    "muon, experts": ("two experts", {"fsdp": 4, "expert": 2}, MUON),
    "a class": ("qwen", BOTH, OWN),
    "frozen": ("qwen", BOTH, FROZEN),
    "adafactor": ("qwen", BOTH, ADAFACTOR),
    "adafactor, pipeline": ("qwen", PIPELINE, ADAFACTOR),
    "adafactor, experts": ("two experts", {"fsdp": 4, "expert": 2}, ADAFACTOR),
    "a class of matrices": ("qwen", BOTH, MATRICES),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAVED)
def test_a_checkpoint_of_four_ranks_passes_through_one_rank_unchanged(models, tmp_path, name):
    model, layout, more = SAVED[name]
    assert_passes_through_one_rank(Case(models[model], layout, **more), tmp_path)
