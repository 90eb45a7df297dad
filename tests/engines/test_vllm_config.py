"""Naming vLLM in a recipe imports nothing, and where it is not installed the answer says what to do."""

import asyncio
import importlib.util
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from transformers import LlavaConfig

from tests.tiny import tiny_llama
from tests.tiny_vision import Family, save_tiny_vision
from tests.toy import toy_recipe
from whet.base.errors import ConfigError, WhetError
from whet.config import SettingsError, load
from whet.engines.config import Adapter, Deployment
from whet.engines.router import Router
from whet.engines.vllm import processes as vllm_processes
from whet.engines.vllm.config import VllmGeneratorConfig, check_images
from whet.engines.vllm.processes import VllmProcesses
from whet.models.config import ModelConfig
from whet.models.loading import load_images, load_model_config
from whet.run.build import build_generator, build_renderer, build_sync
from whet.run.recipe import Recipe
from whet.weights.config import WeightSyncConfig


def test_a_recipe_with_vllm_is_read_without_torch_and_vllm() -> None:
    code = (
        "import sys; from whet.config import load; from whet.run.recipe import Recipe;"
        "load(Recipe, 'quickstart', ['generator={type: vllm, replicas: 2, dtype: float32}']);"
        "load(Recipe, 'quickstart', ['generator=vllm', 'model.lora={rank: 8}', 'weights.lora=adapter']);"
        "load(Recipe, 'quickstart', ['weights.transport=cuda_ipc', 'devices.placement=colocated',"
        "'generator={type: vllm, devices: \"0\"}']);"
        "print([m for m in ('torch', 'transformers', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_vllm_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="make install-vllm"):
        VllmGeneratorConfig().build(tiny_llama().config, None)


def test_an_engine_beside_gpus_has_to_say_which_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"generator\.devices is not set: .* the GPU that the learner computes on"):
        VllmGeneratorConfig().build(tiny_llama().config, None)
    engine = VllmGeneratorConfig(devices="2,3", tensor=2).build(tiny_llama().config)
    assert engine.deployment.gpus == ("2", "3")


def test_the_engine_is_born_with_its_devices_only() -> None:
    assert VllmProcesses(VllmGeneratorConfig(), Deployment(gpus=("2",))).environment()["CUDA_VISIBLE_DEVICES"] == "2"


def settings_of(deployment: Deployment, **config: object) -> dict[str, Any]:
    return VllmProcesses(VllmGeneratorConfig(**config), deployment)._settings()


def test_an_engine_starts_beside_a_learner_on_its_gpu() -> None:
    """vLLM's ``request_memory`` asks for this share of all memory to be free, whatever size its cache has."""
    settings = settings_of(Deployment(gpus=("0",)), cache_gib=2.0)
    free, total = 80.0, 140.4  # the learner has the rest
    assert free >= settings["gpu_memory_utilization"] * total
    assert settings["kv_cache_memory_bytes"] == 2 * 2**30
    assert "gpu_memory_utilization" not in settings_of(Deployment()), "on CPUs"


def test_on_gpus_the_defaults_are_a_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_processes, "free_memory_fraction", lambda names: {("4", "5"): 0.5}[names])
    gpus, cpus = Deployment(gpus=("4", "5")), Deployment()
    here, there = settings_of(gpus, tensor=2), settings_of(cpus)
    assert here["gpu_memory_utilization"] == pytest.approx(0.45)
    assert "kv_cache_memory_bytes" not in here, "vLLM measures what the model leaves"
    assert (here["enforce_eager"], there["enforce_eager"]) == (False, True)
    assert (here["max_num_batched_tokens"], there["max_num_batched_tokens"]) == (8192, 4096)
    assert here["hf_overrides"] == {"head_dtype": "float32"}
    assert "hf_overrides" not in there
    assert there["kv_cache_memory_bytes"] == 2**30
    assert "TORCHDYNAMO_DISABLE" not in VllmProcesses(VllmGeneratorConfig(), gpus).environment()
    assert VllmProcesses(VllmGeneratorConfig(), cpus).environment()["TORCHDYNAMO_DISABLE"] == "1"


def test_an_engine_sleeps_where_it_has_gpus_also_under_a_process_that_sees_none() -> None:
    assert not torch.cuda.is_available()
    for gpus, sleeps in ((("0",), True), ((), True), (("0",), False)):
        processes = VllmProcesses(VllmGeneratorConfig(), Deployment(gpus=gpus, sleeps=sleeps))
        assert processes.frees_memory == bool(gpus and sleeps)


def test_devices_are_counted_as_this_process_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-11aa,6")
    named = {"0": ("4",), "1": ("GPU-11aa",), "GPU-22bb": ("GPU-22bb",)}
    for devices, gpus in named.items():
        engine = VllmGeneratorConfig(devices=devices).build(tiny_llama().config)
        assert engine.deployment.gpus == gpus
    with pytest.raises(ConfigError, match=r"generator\.devices names GPU 3, but this process sees 3"):
        VllmGeneratorConfig(devices="3").build(tiny_llama().config)
    for hidden in ("", " "):  # as a zero-GPU actor of Ray has it: the engine's own numbers
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert VllmGeneratorConfig(devices="3").build(tiny_llama().config).deployment.gpus == ("3",)


def test_an_engine_takes_one_device_for_each_rank() -> None:
    for devices, tensor in (("2,3", 1), ("2", 2), ("0,1,2", 2)):
        with pytest.raises(SettingsError, match="one for each rank"):
            VllmGeneratorConfig(devices=devices, tensor=tensor)


@pytest.mark.parametrize(
    ("tensor", "sizes", "what"),
    [
        (3, {}, "4 heads"),
        (8, {}, "4 heads"),
        (6, {"num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 96}, "4 key-value heads"),
        (4, {"intermediate_size": 126}, "intermediate_size 126"),
        (
            3,
            {"num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 129, "hidden_size": 96},
            "320 rows",
        ),
    ],
)
def test_ranks_that_cannot_share_the_model_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tensor: int, sizes: dict[str, int], what: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ConfigError, match=rf"generator\.tensor = {tensor} does not divide .* {what}"):
        VllmGeneratorConfig(tensor=tensor).build(tiny_llama(**sizes).config, None)


def test_more_ranks_than_key_value_heads_can_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    for tensor in (1, 2, 4):
        assert VllmGeneratorConfig(tensor=tensor).cannot_run(tiny_llama(num_key_value_heads=1).config) is None


def test_the_ranks_divide_the_engines_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_processes, "cores", lambda: 6)
    for settings, expected in (({"tensor": 2}, "3"), ({"tensor": 2, "threads": 4}, "2"), ({"tensor": 8}, "1")):
        processes = VllmProcesses(VllmGeneratorConfig(**settings), Deployment())
        assert processes.environment()["OMP_NUM_THREADS"] == expected


def test_replicas_share_devices_and_cores_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    config, cores = VllmGeneratorConfig(tensor=2, replicas=2, devices="4,5,6,7"), Deployment((0, 1, 2, 3))
    router = config.build(tiny_llama().config, None, cores)
    assert [one.deployment.gpus for one in router.replicas] == [("4", "5"), ("6", "7")]
    assert [one.deployment.cores for one in router.replicas] == [[0, 1], [2, 3]]
    with pytest.raises(SettingsError, match="need 4: one for each rank"):
        VllmGeneratorConfig(tensor=2, replicas=2, devices="4,5,6")


def test_a_recipe_that_says_router_is_told_what_to_say() -> None:
    advice = r"the type router was removed: set the engine.s replicas.*\{type: vllm, replicas: 2\}"
    with pytest.raises(ConfigError, match=advice):
        load(Recipe, "quickstart", ["generator={type: router, replicas: 2, replica: vllm}"])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["generator=vllm", "model.lora=null"], r"model\.lora is not set"),
        (["model.lora={rank: 8}"], r"needs generator = vllm"),
        (["model.lora={rank: 8}", "generator={type: torch, replicas: 2}"], r"needs generator = vllm"),
        (["model.lora={rank: 513}", "generator=vllm"], r"model\.lora\.rank is 513: .* up to 512"),
    ],
)
def test_an_adapter_that_can_not_travel_alone_is_refused_with_the_recipe(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"weights\.lora = adapter .*{words}"):
        load(Recipe, "quickstart", ["weights.lora=adapter", *overrides])


@pytest.mark.parametrize("replicas", [1, 2])
def test_engines_are_told_of_the_adapters_to_come(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, replicas: int
) -> None:
    honest = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: name == "vllm" or honest(name, *more))
    lora = {"rank": 12, "target_modules": ["q_proj", "mlp.down_proj"]}
    weights = WeightSyncConfig(lora="adapter")
    recipe = toy_recipe(tiny_model, model={"lora": lora})
    recipe = recipe.model_copy(update={"generator": VllmGeneratorConfig(replicas=replicas), "weights": weights})
    built = build_generator(recipe, build_renderer(recipe))
    for engine in built.replicas if isinstance(built, Router) else [built]:
        assert engine.deployment.adapter == Adapter(12, ("down_proj", "q_proj"))


@pytest.mark.parametrize("adapted", ["lm_head", "embed_tokens"])
@pytest.mark.parametrize("weights", ["merged", "adapter"])
def test_adapters_that_no_generator_can_get_are_refused_before_a_model_is_loaded(
    tiny_model: Path, adapted: str, weights: str
) -> None:
    recipe = toy_recipe(tiny_model, model={"lora": {"target_modules": [adapted, "q_proj"]}})
    recipe = recipe.model_copy(update={"weights": WeightSyncConfig(lora=weights)})
    with pytest.raises(WhetError, match=rf"target_modules: .*{adapted} is .*; adapt other modules"):
        build_generator(recipe, build_renderer(recipe))


def test_speed_is_asked_for_in_vllms_words() -> None:
    gpu = Deployment(gpus=("0",), sleeps=True)
    settings = settings_of(gpu, cache_gib=1.0, quantization="fp8", kv_dtype="fp8", speculative={"type": "ngram"})
    guesses = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2, "num_speculative_tokens": 4}
    assert settings["speculative_config"] == guesses
    assert settings["sleep_preserve_parameter_names"] == ["draft.*"], "no part of the run publishes those"
    assert (settings["quantization"], settings["kv_cache_dtype"]) == ("fp8_per_channel", "fp8")
    plain = settings_of(gpu, cache_gib=1.0)
    assert plain["kv_cache_dtype"] == "auto"
    assert not {"quantization", "speculative_config"} & plain.keys()
    draft = {"type": "draft", "model": "small", "tokens": 3}
    settings = settings_of(gpu, cache_gib=1.0, speculative=draft)["speculative_config"]
    assert (settings["model"], settings["num_speculative_tokens"]) == ("small", 3)
    assert settings["draft_load_config"] == {"load_format": "auto"}, "its weights come from files, the policy's don't"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("generator={type: vllm, quantization: fp8, dtype: float32}", "set dtype"),
        ("generator={type: vllm, speculative: {type: ngram, shortest: 5}}", "shortest = 5 is more than longest = 4"),
        ("generator={type: vllm, speculative: {type: draft}}", "model"),
    ],
)
def test_what_can_not_work_together_is_refused_with_the_recipe(settings: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(Recipe, "quickstart", [settings])


def test_guesses_and_min_p_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=r"generator\.speculative\) with sampling\.min_p"):
        load(Recipe, "quickstart", ["generator={type: vllm, speculative: ngram, devices: '1'}", "sampling.min_p=0.1"])


def test_an_adapter_needs_the_weights_that_level_2_drops() -> None:
    overrides = ["generator={type: vllm, sleep_level: 2}", "model.lora={rank: 8}", "weights.lora=adapter"]
    with pytest.raises(ConfigError, match=r"sleep_level = 2 drops the frozen weights"):
        load(Recipe, "quickstart", overrides)


def test_guesses_on_cpus_are_refused_when_the_recipe_is_read() -> None:
    with pytest.raises(ConfigError, match=r"generator\.speculative needs GPUs"):
        load(Recipe, "quickstart", ["generator={type: vllm, speculative: ngram}"])


def test_guesses_on_cpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ConfigError, match=r"generator\.speculative needs GPUs"):
        VllmGeneratorConfig(speculative="ngram").build(tiny_llama().config)


def test_rollouts_of_8_bits_are_corrected_and_probed_with_room(tiny_model: Path) -> None:
    for setting in ("quantization", "kv_dtype"):
        loaded = load(Recipe, "quickstart", [f"generator={{type: vllm, {setting}: fp8}}"])
        assert loaded.value.algorithm.loss.correction is not None
        assert loaded.origins["algorithm.loss.correction.type"] == f"generator.{setting}"
        recipe = toy_recipe(tiny_model).model_copy(update={"generator": loaded.value.generator})
        sync: Any = build_sync(recipe, [1, 2])
        assert sync.config.probe_tolerance == 0.5
    kept = load(Recipe, "quickstart", ["generator={type: vllm, kv_dtype: fp8}", "algorithm.loss.correction=null"])
    assert kept.value.algorithm.loss.correction is None
    assert load(Recipe, "quickstart", ["generator=vllm"]).value.algorithm.loss.correction is None


def test_engines_on_a_cluster_need_nodes_and_leave_the_choice_of_gpus_to_them(tiny_model: Path) -> None:
    on: dict[str, Any] = {"type": "vllm", "on_cluster": True}
    assert toy_recipe(tiny_model, generator=on, cluster={"type": "ray"}).generator.on_cluster
    for changes, words in (
        ({"generator": on}, "set cluster=ray"),
        ({"generator": {"type": "torch", "on_cluster": True}, "cluster": {"type": "ray"}}, "set generator=vllm"),
        ({"generator": on | {"devices": "0"}, "cluster": {"type": "ray"}}, r"leave generator\.devices out"),
        (
            {"generator": on, "cluster": {"type": "ray"}, "devices": {"generator_cores": 1}},
            r"devices\.generator_cores is for this machine; leave it out",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            toy_recipe(tiny_model, **changes)


def built(folder: Path, dtype: Any) -> Any:
    images = load_images(ModelConfig(path=str(folder), vision="frozen"))
    model = load_model_config(ModelConfig(path=str(folder)))
    return VllmGeneratorConfig(dtype=dtype).build(model, None, Deployment(images=images))


def test_a_model_whose_images_vllm_may_read_otherwise_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reads images with gemma3, gemma4, .*, not with llava; set generator=torch"):
        check_images(LlavaConfig())


def test_linear_attention_is_computed_in_bfloat16_without_a_cache_of_states(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    save_tiny_vision(tmp_path, "qwen3_5")
    with pytest.raises(ConfigError, match=r"the linear attention of qwen3_5 in bfloat16 only; set generator\.dtype"):
        built(tmp_path, "float32")
    assert not built(tmp_path, "bfloat16").config.prefix_caching


@pytest.mark.parametrize(
    ("family", "part", "setting", "words"),
    [
        ("gemma3", None, ("mm_tokens_per_image", 256), r"an image has 256 tokens, and layers of the model see 6"),
        ("gemma4", None, None, r"an image has 70 tokens, and layers of the model see 6 \(sliding_window\)"),
        ("gemma4", "vision_config", ("default_output_length", None), r"vision_config\.default_output_length"),
        ("gemma4", "text_config", ("pad_token_id", 3), r"as token 0 and in the learner as pad_token_id, which is 3"),
        ("gemma4", "text_config", ("sliding_window", 70), None),
        ("qwen3_vl_moe", None, None, None),
        ("qwen3_vl_moe", "text_config", ("norm_topk_prob", None), r"only with text_config\.norm_topk_prob = true"),
        ("gemma4_small", None, None, None),  # whose images are read from left to right
    ],
)
def test_settings_with_which_vllm_reads_images_otherwise_are_refused(
    tmp_path: Path, family: Family, part: str | None, setting: tuple[str, int | None] | None, words: str | None
) -> None:
    save_tiny_vision(tmp_path, family)
    config: Any = load_model_config(ModelConfig(path=str(tmp_path)))
    if setting is not None:
        setattr(config if part is None else getattr(config, part), *setting)
    with nullcontext() if words is None else pytest.raises(ConfigError, match=words):
        check_images(config)


def test_an_engine_whose_process_ends_while_it_is_killed_closes_its_sockets() -> None:
    class Engine:
        output_handler = None
        closed = 0

        @property
        def engine_core(self) -> Any:
            return SimpleNamespace(resources=self.close)

        def close(self) -> None:
            self.closed += 1

        def shutdown(self, timeout: float) -> None:
            raise psutil.NoSuchProcess(1)

    engine: Any = Engine()
    asyncio.run(VllmProcesses(VllmGeneratorConfig(dtype="float32"), Deployment()).end(engine))
    assert engine.closed == 1
