"""From names and folders to models: what loads, what is refused and in which words."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import close_session
from safetensors.torch import load_file, save_file
from transformers import MambaConfig, MambaForCausalLM, Qwen3ForSequenceClassification

from tests.groups import episode
from tests.tiny import tiny_llama, tiny_qwen3, tiny_tokenizer
from whet.base.errors import WhetError
from whet.core.batch import Batch
from whet.core.types import Group, Span, Task
from whet.models.attention.forest import forest_hidden, supports_forest
from whet.models.head import ValueHead, check_head, head_of
from whet.models.loading import LoraSettings, ModelConfig, load_model, load_model_config, load_tokenizer

BATCH = Batch.from_groups([Group("a", Task("a", []), [episode([Span([1, 2], False), Span([3, 4], True)])] * 2)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    tiny_qwen3().save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return place


def test_a_folder_loads_with_forest_attention_in_the_wanted_type(folder: Path) -> None:
    config = ModelConfig(path=str(folder))
    model = load_model(config, dtype=torch.float64)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert all(p.requires_grad for p in model.parameters())
    assert forest_hidden(model, BATCH).shape == (len(BATCH), 64)
    assert supports_forest(load_model_config(config))
    assert load_tokenizer(config).decode(load_tokenizer(config)("a b").input_ids) == "a b"


def test_a_model_that_is_not_trained_asks_for_no_gradient(folder: Path) -> None:
    config = ModelConfig(path=str(folder), lora=LoraSettings(rank=2))
    model = load_model(config, dtype=torch.float32, train=False)
    assert not any(p.requires_grad for p in model.parameters())
    assert not any("lora" in name for name, _ in model.named_parameters())
    assert not model.training


def test_adapters_depend_on_their_seed_alone_and_leave_the_model_as_it_was(folder: Path) -> None:
    config = ModelConfig(path=str(folder), lora=LoraSettings(rank=2))

    def adapters(seed: int) -> dict[str, torch.Tensor]:
        torch.rand(torch.randint(1, 9, ()))
        model = load_model(config, dtype=torch.float32, seed=seed)
        trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        assert trained
        assert all("lora" in name for name in trained)
        plain = load_model(ModelConfig(path=str(folder)), dtype=torch.float32)
        torch.testing.assert_close(forest_hidden(model, BATCH), forest_hidden(plain, BATCH))
        assert head_of(model).weight.shape == head_of(plain).weight.shape
        return trained

    first, again, other = adapters(1), adapters(1), adapters(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize(
    ("targets", "why"),
    [
        (["q_proj", "qq_proj"], "target_modules: 'qq_proj' is the end of no module's name .*down_proj, gate_proj"),
        (["q_proj", "self_attn"], r"model\.lora: Target module Qwen3Attention\(.*is not supported"),
        ([], r"model\.lora: No `target_modules` passed"),
    ],
)
def test_target_modules_that_lora_cannot_adapt_are_named(folder: Path, targets: list[str], why: str) -> None:
    with pytest.raises(WhetError, match=why):
        load_model(ModelConfig(path=str(folder), lora=LoraSettings(target_modules=targets)), dtype=torch.float32)


def test_gradients_reach_adapters_through_forest_and_head(folder: Path) -> None:
    model = load_model(ModelConfig(path=str(folder), lora=LoraSettings(rank=2)), dtype=torch.float32)
    forest_hidden(model, BATCH).sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "lora_B" in name)


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/at/all", "just-a-name"])
def test_a_folder_that_is_not_there_is_named(path: str) -> None:
    with pytest.raises(WhetError, match=path):
        load_model(ModelConfig(path=path), dtype=torch.float32)


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(WhetError, match=r"config\.json"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))


def test_weights_in_a_format_that_can_run_code_are_refused(tmp_path: Path) -> None:
    model = tiny_llama()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(WhetError, match="safetensors"):
        load_model(ModelConfig(path=str(tmp_path)), dtype=torch.float32)


@pytest.fixture
def new_client() -> Iterator[None]:
    """A client of the Hub keeps the proxies that it was made with."""
    close_session()
    yield
    close_session()


@pytest.mark.usefixtures("new_client")
def test_a_hub_id_without_a_network_fails_soon_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    with pytest.raises(WhetError, match="can't be reached"):
        load_model(ModelConfig(path="no-such-owner/no-such-model"), dtype=torch.float32)
    assert sum(waited) < 15


def changed(folder: Path, to: Path, **config: object) -> Path:
    """A copy of a model's folder with other settings."""
    shutil.copytree(folder, to)
    settings = json.loads((to / "config.json").read_text()) | config
    (to / "config.json").write_text(json.dumps(settings))
    return to


def loaded(folder: Path) -> torch.nn.Module:
    return load_model(ModelConfig(path=str(folder)), dtype=torch.float32)


def test_a_run_can_not_start_from_a_reward_model_whose_head_would_be_lost(folder: Path, tmp_path: Path) -> None:
    Qwen3ForSequenceClassification.from_pretrained(folder, num_labels=1).save_pretrained(tmp_path)
    with pytest.raises(WhetError, match=rf"{tmp_path} is a reward model .* head would be left out"):
        load_model(ModelConfig(path=str(tmp_path)), dtype=torch.float32)


def test_a_folder_that_lacks_weights_is_refused(folder: Path, tmp_path: Path) -> None:
    layers = load_model_config(ModelConfig(path=str(folder))).num_hidden_layers
    deeper = changed(folder, tmp_path / "deeper", num_hidden_layers=layers + 1, layer_types=None)
    with pytest.raises(WhetError, match=rf"{deeper}: .* lack \d+ of the weights .*model\.layers\.{layers}\..*random"):
        loaded(deeper)
    empty = changed(folder, tmp_path / "empty")
    (weights,) = empty.glob("*.safetensors")
    save_file({}, weights, {"format": "pt"})
    with pytest.raises(WhetError, match=rf"{empty}: .* lack \d+ of the weights"):
        loaded(empty)


def test_a_quantized_model_is_refused(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="loads the quantized model")
    setting = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    quantized = changed(folder, tmp_path / "quantized", quantization_config=setting)
    (file,) = quantized.glob("*.safetensors")
    weights = load_file(file)
    for name in [name for name in weights if name.endswith("proj.weight")]:
        scale = weights[name].abs().amax(1)
        weights[name.replace("weight", "SCB")] = scale
        weights[name] = (weights[name] / scale[:, None] * 127).round().to(torch.int8)
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(WhetError, match=rf"{quantized} is quantized, .* weights of torch\.int8 can't be trained"):
        loaded(quantized)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ({"num_attention_heads": 0}, "can't be loaded"),
        ({"vocab_size": "many"}, "can't be loaded: .*'vocab_size': .*int"),
        ({"vocab_size": -1}, "can't be loaded: "),
        ({"hidden_size": 128, "intermediate_size": 128}, "other shapes than its config.json asks for"),
        ({"model_type": "no-such-kind"}, "no-such-kind"),
        ({"model_type": "qwen3_vl"}, r"\(qwen3_vl\) reads images as well: set model.vision to frozen or trained"),
    ],
)
def test_a_config_that_makes_no_model_is_named(folder: Path, tmp_path: Path, damage: dict, says: str) -> None:
    damaged = changed(folder, tmp_path / "damaged", **damage)
    with pytest.raises(WhetError, match=says) as error:
        loaded(damaged)
    assert str(damaged) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("damage", "says"),
    [({}, "KeyError: 'added_tokens'"), (None, r"it has no tokenizer.json; copy")],
)
def test_a_tokenizer_that_can_not_be_read_is_named(
    folder: Path, tmp_path: Path, damage: dict[str, object] | None, says: str
) -> None:
    to = changed(folder, tmp_path / "damaged")
    for path in to.glob("*token*.json"):
        path.unlink()
    if damage is not None:
        (to / "tokenizer.json").write_text(json.dumps(damage))
        (to / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(WhetError, match=rf"no tokenizer could be read from the model's folder {to}: {says}"):
        load_tokenizer(ModelConfig(path=str(to)))


def test_weights_that_are_not_finite_are_named(folder: Path, tmp_path: Path) -> None:
    to = changed(folder, tmp_path / "infinite")
    (weights,) = to.glob("*.safetensors")
    state = load_file(weights)
    save_file(state | {"model.norm.weight": state["model.norm.weight"] * float("nan")}, weights, {"format": "pt"})
    with pytest.raises(WhetError, match=rf"the model {to} computes numbers that are not finite"):
        loaded(to)
    model = tiny_llama()
    torch.nn.init.constant_(model.get_output_embeddings().weight, float("inf"))
    with pytest.raises(WhetError, match="the model LlamaForCausalLM computes numbers that are not finite"):
        check_head(model)


@pytest.mark.parametrize("keep", [0, 5, 100, -10], ids=["nothing", "length", "header", "end"])
def test_a_file_of_weights_that_was_cut_off_is_named(folder: Path, tmp_path: Path, keep: int) -> None:
    cut = changed(folder, tmp_path / "cut")
    (weights,) = cut.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(WhetError, match=rf"the model's file {weights} is damaged.*; copy or download it again"):
        loaded(cut)


def test_a_recurrent_model_loads_and_says_that_prompts_are_not_shared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4)).save_pretrained(
        tmp_path
    )
    load_model(ModelConfig(path=str(tmp_path)), dtype=torch.float32)
    assert "once per answer" in caplog.text


def test_a_value_head_gives_one_number_per_token_and_depends_on_its_seed_alone() -> None:
    hidden = torch.randn(5, 16)
    values = ValueHead(16, seed=3)(hidden)
    assert values.shape == (5,)
    assert torch.equal(values, ValueHead(16, seed=3)(hidden))
    assert not torch.equal(values, ValueHead(16, seed=4)(hidden))
    with torch.autocast("cpu", torch.bfloat16):
        assert ValueHead(16)(hidden.bfloat16()).dtype == torch.float32
