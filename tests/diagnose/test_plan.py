"""Plans of whole recipes, computed from the config file of a model."""

from fractions import Fraction
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import DeepseekV3Config

from tests.tiny import tiny_llama, tiny_tokenizer
from tests.tiny_vision import save_tiny_vision
from tests.toy import toy_recipe
from whet.base.files import format_bytes
from whet.cli.main import main
from whet.diagnose.layout import stages
from whet.diagnose.memory import CUDA_CONTEXT
from whet.diagnose.plan import make_plan
from whet.engines.vllm.config import VllmGeneratorConfig
from whet.parallel.config import ParallelConfig
from whet.weights.config import WeightSyncConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def test_the_parts_of_a_step_are_in_its_plan(folder):
    plan = make_plan(toy_recipe(folder), runtime=1000)
    assert plan.ranks == 1
    here = plan.processes["this process"]
    assert set(here.always) == {"runtime", "weights", "optimizer"}
    assert set(here.phases) == {"learn", "generate", "publish"}
    assert [phase for phase, kinds in here.phases.items() if "generator weights" in kinds] == ["generate", "publish"]
    ahead = make_plan(toy_recipe(folder, rollouts={"max_staleness": 1}), runtime=1000).processes["this process"]
    assert ahead.always["generator weights"] == here.phases["generate"]["generator weights"]
    assert plan.refit == plan.models["policy"].parameters * 4
    assert not plan.warnings


@pytest.mark.parametrize(("pack_tokens", "kept"), [(None, 8 * 4 * 8), (64, 64)])
def test_a_micro_batch_may_be_made_of_answers_alone(folder, pack_tokens, kept):
    """Of 8 prompts with 4 answers of up to 8 tokens each."""
    sizes = {
        "rollouts": {"prompts_per_step": 8},
        "algorithm": {"type": "grpo", "group_size": 4},
        "sampling": {"max_new_tokens": 8, "max_prompt_tokens": 56},
        "learner": {"pack_tokens": pack_tokens, "precision": "float32"},
    }
    plan = make_plan(toy_recipe(folder, **sizes), runtime=0)
    products = plan.processes["this process"].phases["learn"]["the head's products"]
    assert products == kept * plan.models["policy"].vocabulary * 4


def test_a_critic_is_a_second_model(folder):
    plan = make_plan(toy_recipe(folder, algorithm={"type": "ppo", "minibatches": 1}), runtime=0)
    here = plan.processes["this process"]
    head = 4 * plan.models["critic"].hidden
    assert here.always["weights of the critic"] == here.always["weights of the policy"] + head
    assert {"learn of the policy", "learn of the critic"} <= set(here.phases)


def test_the_frozen_start_of_an_implicit_reward_model_is_counted(folder):
    plan = make_plan(toy_recipe(folder, algorithm={"type": "prime"}), runtime=0)
    assert plan.processes["this process"].always["reference of the implicit_reward"] > 0
    assert "reference of the policy" not in plan.processes["this process"].always


def test_a_kl_term_costs_a_reference(folder):
    plan = make_plan(toy_recipe(folder, algorithm={"loss": {"type": "policy", "kl": {}}}), runtime=0)
    assert plan.processes["this process"].always["reference"] > 0


def test_a_plan_that_does_not_fit_is_warned_of_with_a_remedy(folder):
    plan = make_plan(toy_recipe(folder), runtime=0, available=1000)
    assert "raise parallel.fsdp" in plan.warnings[0]


@pytest.mark.slow
def test_a_model_of_671_billion_parameters_on_2048_ranks(tmp_path):
    DeepseekV3Config().save_pretrained(tmp_path)
    parallel = {"fsdp": 2048, "expert": 64}
    cluster = {"type": "ray"}
    changes = {
        "learner": {"activation_checkpointing": True, "precision": "float32"},
        "rollouts": {"prompts_per_step": 2048},
    }
    plan = make_plan(toy_recipe(tmp_path, cluster=cluster, parallel=parallel, **changes), runtime=0)
    assert plan.ranks == 2048
    assert plan.layout[-1].startswith("expert 64: neighbouring")
    assert plan.models["policy"].parameters == pytest.approx(671e9, rel=0.001)
    assert plan.models["policy"].experts == pytest.approx(654e9, rel=0.001)
    assert not plan.warnings
    memory = plan.processes["each rank of the policy"]
    assert memory.always["weights"] == pytest.approx(671e9 * 4 / 2048, rel=0.01)
    assert memory.phases["learn"]["gathered layers"] == pytest.approx(2 * 4 * (0.23e9 + 11.27e9 / 64), rel=0.05)


def test_a_layout_that_will_be_refused_is_said(tmp_path):
    DeepseekV3Config(num_hidden_layers=4, vocab_size=264).save_pretrained(tmp_path)
    for parallel, words in (
        ({"fsdp": 24, "expert": 24}, "parallel.expert = 24 does not divide the 256 experts of DeepseekV3Model"),
        ({"tensor": 2}, "its tensor-parallel plan does not include layers.0.self_attn.q_a_proj"),
    ):
        plan = make_plan(toy_recipe(tmp_path, cluster={"type": "ray"}, parallel=parallel), runtime=0)
        assert any(w.startswith("this layout will be refused for the policy: ") and words in w for w in plan.warnings)


def test_learners_and_engines_in_separate_processes_are_planned_separately(folder):
    ppo = {"type": "ppo", "minibatches": 1}
    recipe = toy_recipe(folder, cluster={"type": "processes"}, algorithm=ppo)
    recipe = recipe.model_copy(update={"generator": VllmGeneratorConfig(cache_gib=2.0, dtype="bfloat16")})
    plan = make_plan(recipe, runtime=1000)
    ranks = [f"each rank of the {role}" for role in ("policy", "critic")]
    assert list(plan.processes) == ["this process", *ranks, "each engine"]
    assert plan.processes["this process"].peak() == 1000
    assert plan.processes["each engine"].always["KV cache"] == 2 * 1024**3
    buffers = {name: memory.always.get("two buffers of a refit", 0) for name, memory in plan.processes.items()}
    assert buffers == {"this process": 0, ranks[0]: 2 * plan.refit, ranks[1]: 0, "each engine": 0}, "one small bucket"
    assert plan.refit == plan.models["policy"].parameters * 2, "vLLM holds bfloat16"
    delta = WeightSyncConfig(transport="collective", delta=True)
    with_copies = make_plan(recipe.model_copy(update={"weights": delta}), runtime=1000)
    for name in (ranks[0], "each engine"):
        added = with_copies.processes[name].always["weights that were sent last"]
        assert added == plan.refit, "a copy of the model at either end"


def test_a_plan_for_a_gpu_counts_what_a_process_holds_there(folder):
    bfloat16 = {"precision": "bfloat16", "device": "cuda", "activation_checkpointing": True}
    engine = {"type": "vllm", "devices": "0"}
    shared = {"cluster": {"type": "processes"}, "generator": engine, "devices": {"placement": "colocated"}}
    plan = make_plan(toy_recipe(folder, learner=bfloat16, **shared), 1000, available=2**31, gpu=True)
    policy, engine = plan.processes["each rank of the policy"], plan.processes["each engine"]
    assert policy.always["runtime"] == engine.always["runtime"] == CUDA_CONTEXT
    assert policy.phases["learn"]["weights as they are computed with"] == 2 * plan.models["policy"].linear
    assert not any("while the engine samples" in one for one in plan.warnings)
    tight = make_plan(toy_recipe(folder, learner=bfloat16, **shared), 0, 2 * CUDA_CONTEXT, gpu=True)
    assert any("while the engine samples it needs" in one for one in tight.warnings)
    lora = make_plan(toy_recipe(folder, learner=bfloat16, model={"lora": {"rank": 4}}, **shared), 0, gpu=True)
    learn = lora.processes["each rank of the policy"].phases["learn"]
    assert "weights as they are computed with" not in learn, "what is frozen is kept in that type"


def test_an_adapter_that_travels_alone_is_planned_apart_from_the_first_refit(folder, tmp_path, capsys):
    from tests.toy import write_recipe

    lora = {"lora": {"rank": 4}}
    vllm = {"type": "vllm", "dtype": "bfloat16"}
    recipe = toy_recipe(folder, model=lora, generator=vllm, weights={"lora": "adapter"})
    plan = make_plan(recipe, runtime=0)
    size = plan.models["policy"]
    assert plan.refit == 2 * size.adapters > 0
    assert plan.refit_tensors == 28
    assert plan.first_refit == 2 * (size.sent + size.adapters)
    merged = make_plan(toy_recipe(folder, model=lora, generator=vllm), runtime=0)
    assert (merged.refit, merged.first_refit) == (2 * size.sent, None)
    with pytest.raises(SystemExit):
        main(["plan", str(write_recipe(tmp_path / "toy.yaml", recipe))])
    assert f"a refit moves {format_bytes(plan.refit)} in 28 tensors, the first one" in capsys.readouterr().out


def test_the_ranks_of_an_engine_share_weights_and_cache(folder):
    recipe = toy_recipe(folder)
    shared = recipe.model_copy(update={"generator": VllmGeneratorConfig(cache_gib=2.0, tensor=2, dtype="bfloat16")})
    plan = make_plan(shared, runtime=1000)
    held = plan.processes["each rank of an engine"].always
    assert held["KV cache"] == 1024**3
    assert held["weights"] == plan.models["policy"].parameters
    assert not plan.warnings
    wrong = recipe.model_copy(update={"generator": VllmGeneratorConfig(tensor=3)})
    assert any("generator.tensor = 3 does not divide the model's" in one for one in make_plan(wrong, 0).warnings)


def test_heads_that_can_not_be_divided_are_said(folder):
    plan = make_plan(toy_recipe(folder, cluster={"type": "ray"}, parallel={"tensor": 4}), runtime=0)
    assert any("does not divide num_key_value_heads = 2" in warning for warning in plan.warnings)


def test_the_command_prints_a_table(folder, tmp_path, capsys):
    from tests.toy import write_recipe

    recipe = write_recipe(tmp_path / "toy.yaml", toy_recipe(folder))
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(recipe), "--memory", "80"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "learner: 1 rank" in said
    assert "peak" in said
    assert "a refit moves" in said
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(recipe), "--memory", "0"])
    assert ended.value.code == 2


@pytest.mark.parametrize(("size", "words"), [(100, "100 B"), (1536, "1.5 KiB"), (3 * 1024**4, "3072.0 GiB")])
def test_sizes_are_said_in_words(size, words):
    assert format_bytes(size) == words


def test_a_save_behind_trainings_back_has_a_copy(folder):
    cluster = {"type": "processes"}
    plan = make_plan(toy_recipe(folder, cluster=cluster, checkpoints={"asynchronous": True}), runtime=0)
    always = plan.processes["each rank of the policy"].always
    assert always["copy that is saved (CPU)"] == always["weights"] + always["optimizer"]


def test_the_stages_of_a_pipeline_are_planned_apart(folder):
    cluster = {"type": "processes"}
    alone = make_plan(toy_recipe(folder, cluster=cluster), runtime=0)
    plan = make_plan(toy_recipe(folder, cluster=cluster, parallel={"pipeline": 2}), runtime=0)
    assert plan.layout == ["pipeline 2: ranks that each hold some of the layers"]
    whole = alone.processes["each rank of the policy"]
    first, last = (plan.processes[f"each rank of the policy, {which} stage"] for which in ("first", "last"))
    assert first.always["weights"] + last.always["weights"] == pytest.approx(whole.always["weights"], rel=1e-3)
    kept = whole.phases["learn"]["activations"]
    assert first.phases["learn"]["activations"] == last.phases["learn"]["activations"] == kept // 2
    assert any("1 micro-batches per data-parallel rank, fewer than the 2 ranks" in warning for warning in plan.warnings)
    kept_of = [stage.share for stage in stages(2, ParallelConfig(pipeline=2), micro_batches=8)]
    assert kept_of == [1, Fraction(1, 2)], "two micro-batches in half the layers, and one"
    travelling = [stage.phases["learn"]["hidden states between stages"] for stage in (first, last)]
    assert travelling[0] == travelling[1] > 0
    assert first.phases["learn"]["gathered embeddings"] > 0, "FSDP over one rank makes a copy, too"
    assert "head" not in first.phases["learn"]
    assert "head" in last.phases["learn"]


def test_more_ranks_of_a_pipeline_than_layers_are_said(folder):
    recipe = toy_recipe(folder, cluster={"type": "ray"}, parallel={"pipeline": 4, "stages_per_rank": 2})
    plan = make_plan(recipe, runtime=0)
    assert not [name for name in plan.processes if name.startswith("each rank")], "there won't be any"
    assert any("2 layers, too few for 8 stages" in warning for warning in plan.warnings)


def test_a_model_with_a_vision_tower_is_planned_with_the_weights_of_the_tower(tmp_path: Path) -> None:
    save_tiny_vision(tmp_path)
    plan = make_plan(toy_recipe(tmp_path, model={"path": str(tmp_path), "vision": "frozen"}), runtime=0)
    weights = load_file(tmp_path / "model.safetensors")
    assert plan.models["policy"].parameters == sum(tensor.numel() for tensor in weights.values())
    assert any("vision_model" in name for name in weights)
