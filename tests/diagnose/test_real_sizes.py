"""The recipes for models of real sizes on GPUs, planned without a GPU and without their weights."""

from pathlib import Path

import pytest
from transformers import PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from whet.config import load
from whet.diagnose.memory import CUDA_CONTEXT
from whet.diagnose.plan import Plan, make_plan
from whet.run.recipe import Recipe

GIB = 2**30
CARD = 80 * GIB  # of an H100

# From the models' config.json, where it differs from the defaults of transformers.
SHARED = {"head_dim": 128, "max_position_embeddings": 40960}
SMALL = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
LARGE = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
EXPERTS = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32}
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3-0.6b-gpu": Qwen3Config(num_key_value_heads=8, tie_word_embeddings=True, **SMALL, **SHARED),
    "qwen3-8b-gpu": Qwen3Config(num_key_value_heads=8, **LARGE, **SHARED),
    "qwen3-30b-a3b-gpu": Qwen3MoeConfig(
        num_key_value_heads=4, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, **EXPERTS, **SHARED
    ),
}


def planned(name: str, folder: Path, available: int = CARD) -> tuple[Recipe, Plan]:
    CONFIGS[name].save_pretrained(folder)
    recipe = load(Recipe, name, [f"model.path={folder}"]).value
    return recipe, make_plan(recipe, 0, available, gpu=recipe.learner.device == "cuda")


@pytest.mark.parametrize(
    ("name", "parameters", "ranks"),
    [("qwen3-0.6b-gpu", 0.596e9, 1), ("qwen3-8b-gpu", 8.19e9, 4), ("qwen3-30b-a3b-gpu", 30.5e9, 24)],
)
def test_a_recipe_for_gpus_fits_on_cards_of_80_gib(name: str, parameters: float, ranks: int, tmp_path: Path) -> None:
    recipe, plan = planned(name, tmp_path)
    assert plan.warnings == []
    assert plan.ranks == ranks
    assert plan.models["policy"].parameters == pytest.approx(parameters, rel=0.002)
    policy = plan.processes["each rank of the policy"]
    assert policy.always["runtime"] == CUDA_CONTEXT
    assert policy.always["two buffers of a refit"] > 0
    assert policy.always["weights"] + policy.always["optimizer"] == pytest.approx(12 * parameters / ranks, rel=0.01)
    engine = next(memory for process, memory in plan.processes.items() if "engine" in process)
    assert engine.always["weights"] == pytest.approx(2 * parameters / recipe.generator.ranks, rel=0.002)
    assert CARD - engine.peak() > 20 * GIB, "room for keys and values"


def test_cards_that_are_too_small_are_said(tmp_path: Path) -> None:
    _, plan = planned("qwen3-0.6b-gpu", tmp_path, available=24 * GIB)
    assert any("each rank of the policy needs about" in warning for warning in plan.warnings)


@pytest.mark.parametrize("name", CONFIGS)
def test_learners_and_engines_have_separate_gpus_or_take_turns(name: str) -> None:
    """On one machine the learner's ranks have the first GPUs; on several machines, Ray assigns the GPUs."""
    recipe = load(Recipe, name).value
    learners = {str(rank) for rank in range(recipe.parallel.ranks)}
    engines = set(recipe.generator.gpus)
    wanted = recipe.generator.ranks * recipe.generator.replicas
    if recipe.generator.on_cluster:
        assert (wanted, wanted + len(learners)) == (8, 4 * 8)
        return
    assert len(engines) == wanted
    if recipe.devices.placement == "colocated":
        assert engines == learners
        assert recipe.weights.transport == "cuda_ipc"
    else:
        assert not engines & learners
        assert len(engines | learners) == 8
    assert recipe.weights.transport != "shared_memory", "from GPU to GPU"
