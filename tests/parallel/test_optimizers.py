"""Optimizers other than AdamW, and settings of parameters by name, learn the same on several ranks as on one."""

import json

import pytest

from tests.parallel.cases import Case, build_errors
from tests.parallel.comparing import check, tables
from tests.parallel.ranks import on_ranks
from tests.parallel.saving import assert_passes_through_one_rank, folders, resume
from whet.learner.optimizer_config import ELEMENTWISE

MUON = {"optimizer": {"type": "muon"}}
PLAIN = {"optimizer": {"type": "muon", "settings": {"nesterov": False, "adjust_lr_fn": "original"}}}
OWN = {"optimizer": {"type": "tests.learner.test_optimizer_types:Counting"}}
ADAFACTOR = {"optimizer": {"type": "adafactor"}}
CLIPPING = {"optimizer": {"type": "adafactor", "settings": {"d": 1.5, "beta2_decay": -0.5}}}
MATRICES = {"optimizer": {"type": "tests.learner.test_optimizer_types:Whitening"}}
FROZEN = {
    "optimizer": {"groups": ({"match": "embed_tokens|layers.0|norm", "freeze": True}, {"match": "mlp", "lr": 1e-3})}
}
RATES = {
    "optimizer": {
        "groups": (
            {"match": "embed_tokens", "lr": 1e-3, "weight_decay": 0.3},
            {"match": "layers.1", "freeze": True},
            {"match": "mlp", "lr": 3e-3},
        )
    }
}
BOTH = {"fsdp": 2, "tensor": 2}
PIPELINE = {"pipeline": 2, "fsdp": 2}
OF_STAGES = {"optimizer": RATES["optimizer"] | MATRICES["optimizer"]}

QUICK = {
    "muon, fsdp": ("llama", {"fsdp": 2}, MUON),
    "adafactor, fsdp": ("llama", {"fsdp": 2}, ADAFACTOR),
}
THOROUGH_2 = {
    "frozen, tensor": ("qwen", {"tensor": 2}, FROZEN),
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
    "frozen, pipeline": ("qwen", {"pipeline": 2}, FROZEN),
    "frozen, pipeline, untied": ("llama", {"pipeline": 2}, FROZEN),
    "rates, pipeline": ("qwen", {"pipeline": 2}, RATES),
    "rates, interleaved": ("qwen of 4", {"pipeline": 2, "stages_per_rank": 2}, RATES),
    "rates, pipeline, muon": ("qwen", {"pipeline": 2}, {"optimizer": RATES["optimizer"] | {"type": "muon"}}),
    "rates, pipeline, value": ("llama", {"pipeline": 2}, RATES | {"loss": "value"}),
    "rates, pipeline, a class of matrices": ("llama", {"pipeline": 2}, OF_STAGES),
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
    "frozen, pipeline and fsdp": ("qwen", PIPELINE, FROZEN),
    "rates, pipeline and tensor": ("llama", {"pipeline": 2, "tensor": 2}, RATES),
    "frozen, tensor and fsdp": ("qwen", BOTH, FROZEN),
}


@tables(QUICK, THOROUGH_2, THOROUGH_4)
def test_several_ranks_learn_the_same_as_one(models, table):
    check(models, table)


SAVED = {
    "muon": ("qwen", BOTH, MUON),
    "muon, pipeline": ("qwen", PIPELINE, MUON),
    "muon, experts": ("two experts", {"fsdp": 4, "expert": 2}, MUON),
    "a class": ("qwen", BOTH, OWN),
    "frozen": ("qwen", BOTH, FROZEN),
    "frozen, pipeline": ("qwen", PIPELINE, FROZEN),
    "rates, pipeline": ("qwen", PIPELINE, RATES),
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


@pytest.mark.slow
def test_settings_that_an_optimizer_changes_are_saved_from_the_stage_that_uses_them(models, tmp_path):
    """Of its groups, some have no parameters on the first stage."""
    one, two = folders(tmp_path, "one", "two")
    case = Case(models["llama"], {"pipeline": 2}, **OF_STAGES)
    resume("", 0, case.one_rank(), None, one, range(2))
    on_ranks(2, resume, case, None, two, range(2))
    alone, staged = (json.loads((folder / "learner.json").read_text())["groups"] for folder in (one, two))
    assert alone == staged
    assert [group["count"] for group in alone] == [2] * len(alone)


@pytest.mark.slow
def test_a_rule_that_no_stage_matches_is_refused_on_all_ranks(models):
    case = Case(models["llama"], {"pipeline": 2}, optimizer={"groups": ({"match": "layers.7", "lr": 1e-3},)})
    for [message] in on_ranks(2, build_errors, [case]):
        assert "optimizer.groups: 'layers.7' matches none of the 21 trained parameters" in message
