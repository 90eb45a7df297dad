"""A learner of Megatron Core's layers learns the same as one of transformers' layers, in any layout over ranks: the
contract of layouts and of checkpoints. Needs the extra ``megatron``."""

import json
from functools import partial
from shutil import copytree

import pytest
import torch
from transformers import InternVLConfig

from tests.parallel.cases import ENOUGH, RECOMPUTED, TOP_P, Case, build_errors, train
from tests.parallel.comparing import check, differences, tables
from tests.parallel.conftest import YARN
from tests.parallel.ranks import on_ranks
from tests.tiny import tiny_deepseek, tiny_llama
from whet.parallel.megatron.families import unsupported

pytest.importorskip("megatron.core", reason="needs Megatron Core: pip install 'whet[megatron]'")

MEGATRON = {"learner": {"type": "megatron"}}
TENSOR, PIPELINE, CONTEXT = {"tensor": 2}, {"pipeline": 2}, {"context": 2}
EXPERT, FSDP = {"expert": 2}, {"fsdp": 2}
LORA, LAST_LAYER = MEGATRON | {"lora": True}, {"target_modules": ["layers.1.mlp.up_proj"]}

QUICK = {
    "tensor": ("qwen", TENSOR, MEGATRON | {"distribution": TOP_P}),
    "pipeline, tied": ("qwen", PIPELINE, MEGATRON),
    "expert, in fsdp": ("mixtral", FSDP | EXPERT, MEGATRON),
}
TWO = {
    "latent attention, tensor": ("deepseek, dense", TENSOR, MEGATRON),
    "lora, tensor": ("llama", TENSOR, LORA),
    "context": ("llama", CONTEXT, MEGATRON),
    "expert, in tensor": ("moe", TENSOR | EXPERT, MEGATRON),
    "tensor, entropy": ("llama", TENSOR, MEGATRON | {"loss": "entropy"}),
    "tensor, value": ("llama", TENSOR, MEGATRON | {"loss": "value"}),
    "tensor, no sequence": ("qwen", TENSOR | {"sequence_parallel": False}, MEGATRON),
    "pipeline, interleaved": ("qwen of 4", PIPELINE | {"stages_per_rank": 2}, MEGATRON),
    "pipeline, value": ("llama", PIPELINE, MEGATRON | {"loss": "value"}),
    "context, tied": ("qwen", CONTEXT, MEGATRON),
    "context, value": ("qwen", CONTEXT, MEGATRON | {"loss": "value"}),
    "replicas": ("llama", {"replicas": 2}, MEGATRON),
    "recomputed": ("qwen", TENSOR, {"learner": MEGATRON["learner"] | RECOMPUTED}),
    "expert, in tensor, recomputed": ("mixtral", TENSOR | EXPERT, {"learner": MEGATRON["learner"] | RECOMPUTED}),
    "expert, in context": ("moe", CONTEXT | EXPERT, MEGATRON | {"loss": "entropy"}),
    "experts, tensor": ("moe", TENSOR, MEGATRON),
    "experts, pipeline": ("mixtral", PIPELINE, MEGATRON),
    "experts, replicas": ("moe", {"replicas": 2}, MEGATRON),
    "fsdp": ("llama", FSDP, MEGATRON),
    "fsdp, tied, recomputed": ("qwen", FSDP, {"learner": MEGATRON["learner"] | RECOMPUTED}),
    "fsdp, value": ("qwen", FSDP, MEGATRON | {"loss": "value"}),
    "fsdp, an idle rank": ("llama", FSDP, MEGATRON | {"max_tokens": ENOUGH, "groups": 1}),
    "fsdp, joined biases": ("qwen2", FSDP, MEGATRON),
    "experts, fsdp": ("moe", FSDP, MEGATRON),
    "expert, in fsdp, an idle rank": ("moe", FSDP | EXPERT, MEGATRON | {"max_tokens": ENOUGH, "groups": 1}),
    "lora, tensor, no sequence": ("qwen", TENSOR | {"sequence_parallel": False}, LORA),
    "lora, tensor, recomputed": ("qwen", TENSOR, LORA | {"learner": MEGATRON["learner"] | RECOMPUTED}),
    "lora, fsdp": ("qwen2", FSDP, LORA),
    "lora, context": ("qwen", CONTEXT, LORA),
    "lora, pipeline": ("llama", PIPELINE, LORA),
    "lora, pipeline, none at the first stage": ("llama", PIPELINE, LORA | {"lora_settings": LAST_LAYER}),
    "lora, value": ("llama", TENSOR, LORA | {"loss": "value"}),
    "lora, experts": ("moe", TENSOR | EXPERT, LORA),
}
FOUR = {
    "tensor and pipeline": ("qwen", TENSOR | PIPELINE, MEGATRON),
    "tensor and context": ("llama", TENSOR | CONTEXT, MEGATRON),
    "tensor and replicas": ("qwen", TENSOR | {"replicas": 2}, MEGATRON),
    "expert, tensor and pipeline": ("mixtral", TENSOR | PIPELINE | EXPERT, MEGATRON),
    "expert, context and pipeline": ("moe", CONTEXT | PIPELINE | EXPERT, MEGATRON),
    "expert, tensor and context": ("mixtral", TENSOR | CONTEXT | EXPERT, MEGATRON),
    "expert 4, tensor and context": ("moe", TENSOR | CONTEXT | {"expert": 4}, MEGATRON),
    "expert, tensor and replicas": ("moe", TENSOR | EXPERT | {"replicas": 2}, MEGATRON),
    "fsdp and tensor": ("qwen", FSDP | TENSOR, MEGATRON),
    "fsdp and tensor, joined biases": ("qwen2", FSDP | TENSOR, MEGATRON),
    "fsdp and pipeline": ("qwen", FSDP | PIPELINE, MEGATRON),
    "fsdp and replicas": ("llama", FSDP | {"replicas": 2}, MEGATRON),
    "expert, fsdp and tensor": ("moe", FSDP | TENSOR | EXPERT, MEGATRON),
    "expert, fsdp and pipeline": ("mixtral", FSDP | PIPELINE | EXPERT, MEGATRON),
    "expert 4, fsdp and context": ("mixtral", FSDP | CONTEXT | {"expert": 4}, MEGATRON),
    "lora, fsdp and tensor": ("qwen", FSDP | TENSOR, LORA),
    "lora, pipeline and tensor": ("qwen", PIPELINE | TENSOR, LORA),
    "lora, fsdp and expert": ("mixtral", {"fsdp": 4} | EXPERT, LORA),
}
RECOMPUTING = {"learner": MEGATRON["learner"] | RECOMPUTED}
LATENT_TWO = {
    "lora, expert, in tensor": ("deepseek", TENSOR | EXPERT, LORA),
    "expert, in tensor": ("deepseek", TENSOR | EXPERT, MEGATRON),
    "tensor, lora": ("deepseek", TENSOR, LORA),
    "tensor, entropy, recomputed": ("deepseek", TENSOR, RECOMPUTING | {"loss": "entropy"}),
    "tensor, queries without latents": ("deepseek, plain queries", TENSOR, MEGATRON),
    "tensor, yarn": ("deepseek, yarn", TENSOR, MEGATRON),
    "experts that no token reaches": ("one-sided", TENSOR | EXPERT, MEGATRON),
    "pipeline": ("deepseek", PIPELINE, MEGATRON),
    "context": ("deepseek", CONTEXT | EXPERT, MEGATRON),
    "fsdp": ("deepseek", FSDP, MEGATRON),
    "expert, in fsdp, value": ("deepseek", FSDP | EXPERT, MEGATRON | {"loss": "value"}),
    "expert, in fsdp, lora": ("deepseek", FSDP | EXPERT, LORA),
    "replicas": ("deepseek", {"replicas": 2}, MEGATRON),
}
LATENT_FOUR = {
    "tensor and pipeline": ("deepseek", TENSOR | PIPELINE | EXPERT, MEGATRON),
    "tensor and context": ("deepseek", TENSOR | CONTEXT | {"expert": 4}, MEGATRON),
    "fsdp and tensor": ("deepseek", FSDP | TENSOR | EXPERT, MEGATRON),
    "fsdp and tensor, lora": ("deepseek", FSDP | TENSOR, LORA),
}
TRAINED, FROZEN = MEGATRON | {"vision": "trained"}, MEGATRON | {"vision": "frozen"}
IMAGES = {"tensor": ("qwen3_vl", TENSOR, TRAINED)}
"""One prompt of three has an image, so that some micro-batches have none."""
IMAGES_2 = {
    "tensor, one layer's features": ("qwen2_5_vl", TENSOR, TRAINED),
    "context": ("qwen2_5_vl", CONTEXT, TRAINED),
    "pipeline": ("qwen3_vl", PIPELINE, TRAINED),
    "tensor, no sequence": ("qwen3_vl", TENSOR | {"sequence_parallel": False}, TRAINED),
    "tensor, frozen, recomputed": ("idefics3", TENSOR, FROZEN | RECOMPUTING),
    "tensor, lora": ("qwen3_vl", TENSOR, FROZEN | {"lora": True}),
    "tensor, expert": ("qwen3_vl_moe", TENSOR | EXPERT, TRAINED),
    "context, features for several layers": ("qwen3_vl", CONTEXT, TRAINED),
    "context, recomputed": ("idefics3", CONTEXT, TRAINED | RECOMPUTING),
    "fsdp": ("qwen2_5_vl", FSDP, TRAINED),
    "fsdp, an idle rank": ("qwen3_vl", FSDP, TRAINED | {"max_tokens": ENOUGH, "groups": 1}),
    "expert, in fsdp": ("qwen3_vl_moe", FSDP | EXPERT, TRAINED),
    "replicas": ("qwen2_5_vl", {"replicas": 2}, TRAINED),
    "pipeline, features for later stages": ("qwen3_vl_moe", PIPELINE, TRAINED),
    "pipeline, frozen": ("qwen2_5_vl", PIPELINE, FROZEN),
    "pipeline, lora": ("qwen2_5_vl", PIPELINE, FROZEN | {"lora": True}),
    "pipeline, value": ("qwen3_vl", PIPELINE, TRAINED | {"loss": "value"}),
    "interleaved": ("idefics3 of 4", PIPELINE | {"stages_per_rank": 2}, TRAINED),
}
IMAGES_4 = {
    "tensor and pipeline": ("qwen3_vl_moe", TENSOR | PIPELINE, TRAINED),
    "tensor and context": ("qwen2_5_vl", TENSOR | CONTEXT, TRAINED),
    "tensor and fsdp": ("qwen3_vl", TENSOR | FSDP, TRAINED),
    "tensor and replicas": ("qwen2_5_vl", TENSOR | {"replicas": 2}, TRAINED),
    "pipeline, fsdp, expert": ("qwen3_vl_moe", PIPELINE | FSDP | EXPERT, TRAINED),
    "context and pipeline": ("qwen3_vl", CONTEXT | PIPELINE, TRAINED),
}


@tables(IMAGES, IMAGES_2, IMAGES_4)
def test_it_learns_the_same_from_images_as_torch(models, table):
    """In the same micro-batches: an image is computed once in each, and norms round to float32."""
    check(models, table, 1e-10, cut=True)


@tables(QUICK, TWO, FOUR)
def test_it_learns_the_same_as_torch(models, table):
    check(models, table)


@pytest.mark.slow
@pytest.mark.parametrize("table", [LATENT_TWO, LATENT_FOUR], ids=["two ranks", "four ranks"])
def test_a_router_that_computes_in_float32_learns_nearly_the_same(models, table):
    check(models, table, 1e-6)


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("moe", MEGATRON),
        ("mixtral", MEGATRON),
        ("llama", LORA),
        ("qwen2", LORA),
        ("moe", LORA),
        ("qwen2_5_vl", TRAINED | {"groups": 3}),
        pytest.param("qwen3_vl", FROZEN | {"lora": True, "groups": 3}, marks=pytest.mark.slow),
    ],
)
def test_one_rank_learns_the_same_as_torch(models, model, more):
    case = Case(models[model], **more)
    assert not list(differences(train("", 0, case.one_rank()), [train("", 0, case)], case, 1e-12))


@pytest.mark.parametrize("padding", [5, -1])
def test_an_input_that_pads_is_not_trained(models, tmp_path, padding):
    """Counted from the end if it is negative, as in torch's embeddings."""
    folder = copytree(models["llama"], tmp_path / "padded")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": padding}))
    case = Case(folder, **MEGATRON)
    assert not list(differences(train("", 0, case.one_rank()), [train("", 0, case)], case, 1e-12))


@pytest.mark.parametrize("more", [MEGATRON, LORA])
def test_one_rank_with_latent_attention_scores_the_same(models, more):
    """The router's float32 shows only in gradients and weights."""
    case = Case(models["deepseek, yarn"], **more)
    alone, found = train("", 0, case.one_rank()), train("", 0, case)
    assert not list(differences(alone, [found], case, 1e-6))
    torch.testing.assert_close(found.scored, alone.scored, rtol=0, atol=1e-12)


def test_what_cannot_be_split_is_refused_on_every_rank(models):
    without = {"tensor": 2, "sequence_parallel": False}
    layouts = {"llama": TENSOR | EXPERT, "moe": without, "deepseek, dense": without}
    for messages in on_ranks(2, build_errors, [Case(models[name], layouts[name], **MEGATRON) for name in layouts]):
        assert "LlamaModel has no experts to split; set parallel.expert to 1" in messages[0]
        assert "is a mixture of experts" in messages[1]
        assert "parallel.sequence_parallel must be true" in messages[1]
        assert "deepseek_v3 has latent attention, whose latents each rank computes for its own tokens" in messages[2]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (partial(tiny_deepseek, rope_interleave=False), "rope_interleave = False"),
        (partial(tiny_deepseek, attention_bias=True), "attention_bias = True"),
        (partial(tiny_deepseek, rope_parameters={**YARN, "rope_type": "linear"}), "rope_type = linear"),
        (partial(tiny_llama, rope_parameters=YARN), "rope_type = yarn"),
    ],
)
def test_settings_of_a_model_that_its_layers_do_not_have_are_named(model, words):
    assert unsupported(model().config) == words


def test_the_language_model_next_to_a_vision_tower_is_checked_too():
    other, wrong = (InternVLConfig(text_config={"model_type": kind}) for kind in ("gemma", "qwen2"))
    wrong.text_config.hidden_act = "gelu"
    assert unsupported(other).startswith("the model_type of its text, gemma, is not one of llama, ")
    assert unsupported(wrong) == "hidden_act = gelu"
