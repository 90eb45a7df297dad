"""A model's size, and the memory of the activations that its forward pass saves for the backward pass. Nothing is
allocated: the model's code runs on fake tensors, so new architectures need no special support.

Independent of recipes and of the layout of ranks.
"""

import copy
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from whet.models.attention.forest import NAME, register, supports_forest
from whet.models.attention.layout import ForestLayout
from whet.models.attention.states import new_cache, supports_cached_decoding, tensors_of
from whet.models.config import LoraSettings, ModelConfig
from whet.models.layer_heads import largest_heads
from whet.models.loading import load_model_config, lora_targets, new_model
from whet.models.moe.experts import experts_of
from whet.models.moe.routing import has_experts
from whet.models.saved_activations import save_fewer_activations
from whet.models.stages import layers_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from whet.learner.config import LearnerConfig

_SOME = 16  # tokens; longer than the window of a convolution
_TRACED = 16384  # tokens; the activations of longer micro-batches are extrapolated linearly


@dataclass(slots=True, frozen=True)
class ModelSize:
    """Counts of numbers, not bytes."""

    parameters: int
    experts: int  # parameters in experts of mixture-of-experts layers
    largest_layer: int  # parameters of the largest decoder layer
    largest_experts: int  # parameters in experts of that layer
    linear: int  # parameters of linear layers other than the head
    embedding: int  # input and output embeddings; tied ones once
    adapters: int  # parameters that LoRA adds
    adapted: int  # layers with an adapter, each with an A and a B
    sent: int  # numbers in a refit of an engine in other processes: all tensors by name, so tied embeddings twice
    tensors: int  # number of tensors in such a refit
    layers: int
    hidden: int
    vocabulary: int
    kv_per_token: int  # KV cache per token, over all layers
    state: int  # state of recurrent and linear layers per sequence, in addition to the KV cache


def model_size(config: "PretrainedConfig", lora: LoraSettings | None = None) -> ModelSize:
    """Count the parameters of a causal language model of this config."""
    text = config.get_text_config()
    with torch.device("meta"):
        model = _model(config, torch.float32)
    embedding = {id(p): p.numel() for p in (model.get_input_embeddings().weight, model.get_output_embeddings().weight)}
    parameters = dict(model.named_parameters())
    layers = layers_of(model.get_decoder())[1]
    largest = max(layers, key=_numbers)
    per_token, state = _cached(config) if supports_cached_decoding(config) else (_kv_per_token(text) * len(layers), 0)
    head = model.get_output_embeddings()
    linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m is not head}
    targets = lora_targets(model, lora) if lora else []
    fused = [p for _, m in experts_of(model) for p in m.parameters() if p.ndim == 3] if lora and lora.experts else []
    adapted = [m for n, m in linears.items() if targets == "all-linear" or n.rpartition(".")[2] in targets]
    sides = sum(m.in_features + m.out_features for m in adapted) + sum(len(p) * sum(p.shape[1:]) for p in fused)
    return ModelSize(
        parameters=sum(p.numel() for p in parameters.values()),
        experts=sum(_numbers(module) for _, module in experts_of(model)),
        largest_layer=_numbers(largest),
        largest_experts=sum(_numbers(module) for _, module in experts_of(largest)),
        linear=sum(m.weight.numel() for m in linears.values()),
        embedding=sum(embedding.values()),
        adapters=lora.rank * sides if lora else 0,
        adapted=len(adapted) if lora else 0,
        sent=sum(tensor.numel() for tensor in model.state_dict().values()),
        tensors=len(model.state_dict()),
        layers=len(layers),
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        kv_per_token=per_token,
        state=state,
    )


def activation_bytes(
    config: "PretrainedConfig",
    lengths: list[int],
    *,
    precision: str,
    checkpointing: bool = False,
    fewer: bool = True,
) -> int:
    """Return the bytes that the decoder saves for its backward pass over sequences of these lengths, without the
    parameters. With ``checkpointing``: each layer's input, and one layer's activations at a time. ``fewer``: as
    ``save_fewer_activations`` leaves them."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    tokens = sum(lengths)
    if checkpointing:
        width = config.get_text_config().hidden_size * (8 if precision == "float64" else 4)
        entering = tokens * width * config.get_text_config().num_hidden_layers
        return entering + layer_bytes(config, lengths, precision=precision)
    layout = ForestLayout.of_lengths(lengths, "cpu")
    # The experts' grouped matrix product has no shape rule for float32.
    weights = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.float32}[precision]
    mixed = precision == "bfloat16"
    if has_experts(config):
        weights, mixed = torch.bfloat16, False
    saved: dict[int, Any] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = _model(config, weights)
        if fewer:
            save_fewer_activations(model)
        parameters = {p.untyped_storage()._cdata for p in model.parameters()}

        def save(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in parameters:
                saved[storage._cdata] = storage  # the reference keeps its id from being reused
            return tensor

        autocast = torch.autocast("cpu", dtype=torch.bfloat16) if mixed else nullcontext()
        inputs: dict[str, Any] = {"input_ids": torch.zeros(1, tokens, dtype=torch.long)}
        inputs["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None]
        if supports_forest(config):
            inputs["whet_forest"] = layout
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor), autocast:
            model.get_decoder()(**inputs, use_cache=False)
        return sum(storage.nbytes() for storage in saved.values())


def layer_bytes(config: "PretrainedConfig", lengths: list[int], *, precision: str) -> int:
    """Return ``activation_bytes`` of the first layer only, all of them: its backward pass works with as many."""
    single = copy.deepcopy(config)
    single.get_text_config().num_hidden_layers = 1
    return activation_bytes(single, lengths, precision=precision, fewer=False)


def _model(config: "PretrainedConfig", dtype: torch.dtype) -> "PreTrainedModel":
    from transformers.initialization import no_init_weights
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = copy.deepcopy(config)
    if supports_forest(config):
        register()
        config._attn_implementation = NAME
    with no_init_weights():
        model = new_model(config, dtype, vision=type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING)
    model.tie_weights()
    return model.train()


def _numbers(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _cached(config: "PretrainedConfig") -> tuple[int, int]:
    """Return the numbers in transformers' cache per token, and per sequence."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    sizes = []
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model = _model(config, torch.bfloat16).eval()
        for tokens in (_SOME, 2 * _SOME):
            cache = new_cache(model)
            model.get_decoder()(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=True, **cache)
            sizes.append(sum(tensor.numel() for part in cache.values() for tensor in tensors_of(part)))
    per_token = (sizes[1] - sizes[0]) // _SOME
    return per_token, sizes[0] - per_token * _SOME


def _kv_per_token(text: "PretrainedConfig") -> int:
    """Return the KV cache of one layer per token: the one with the largest heads, if they differ. DeepSeek's latent
    attention caches one compressed vector."""
    if getattr(text, "kv_lora_rank", None):
        return int(text.kv_lora_rank + text.qk_rope_head_dim)
    if not getattr(text, "num_attention_heads", None):
        return 0
    return largest_heads(text).cached


@cache
def micro_batch_bytes(model: ModelConfig, learner: "LearnerConfig", lengths: tuple[int, ...]) -> tuple[int, int]:
    """Return the bytes that a micro-batch saves for its backward pass, in all layers and in one layer."""
    config = load_model_config(model)
    part = list(lengths[: max(1, _TRACED // lengths[0])])
    saved = activation_bytes(
        config,
        part,
        precision=learner.computes_in,
        checkpointing=learner.activation_checkpointing,
        fewer=not learner.compile,
    )
    layer = layer_bytes(config, part, precision=learner.computes_in)
    return saved * sum(lengths) // sum(part), layer * sum(lengths) // sum(part)
