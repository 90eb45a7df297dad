"""The floating-point operations that a model needs for a batch, from its config. A product of matrices counts a
multiplication and an addition for each weight and token; attention counts the pairs of tokens that its mask lets
attend. Not counted are operations that are repeated to save memory, norms, gates, and the states of linear attention.
Divided by time and by a device's peak it is the model FLOPs utilization of PaLM (Chowdhery et al. 2022, appendix B),
with causal attention.
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor, nn

from whet.models.layer_heads import heads_of
from whet.models.moe.experts import experts_of
from whet.models.quantized import quantized_layers

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_CHOSEN_EXPERTS = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k")


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """Floating-point operations of the parts of a model."""

    body: float  # of a token in the forward pass, in products with weights other than the head's
    body_trained: float  # the part of it whose weights are trained
    head: float  # of a token whose log-prob or value is computed
    head_trained: float
    pair: dict[int | None, float]  # of a query with a key, over all layers with this window (None: no window)

    @classmethod
    def of(cls, model: nn.Module, value_head: bool = False) -> Self:
        """Count the parts of a causal language model, which may be on ``meta``. ``value_head``: it has one number
        instead of the vocabulary as its output."""
        whole: Any = model
        text = whole.config.get_text_config()
        output, inputs = whole.get_output_embeddings().weight, whole.get_input_embeddings().weight
        chosen = next((getattr(text, name) for name in _CHOSEN_EXPERTS if getattr(text, name, None)), None)
        experts = {id(p) for _, module in experts_of(model) for p in module.parameters()}
        body = body_trained = 0.0
        for parameter in model.parameters():
            if parameter.ndim < 2 or parameter is output or parameter is inputs:
                continue
            share = chosen / len(parameter) if chosen and id(parameter) in experts else 1.0
            body += 2 * share * parameter.numel()
            body_trained += 2 * share * parameter.numel() * parameter.requires_grad
        body += sum(2.0 * layer.in_features * layer.out_features for layer in quantized_layers(model).values())
        head = 2.0 * output.shape[1] * (1 if value_head else output.shape[0])
        return cls(body, body_trained, head, head * (value_head or output.requires_grad), _attention(text))

    def needed(self, position: Tensor, predicted: int, backward: bool = False) -> float:
        """Return the operations for tokens at these positions [N] of their sequences: tokens that sequences share are
        computed once. ``predicted``: the number of tokens whose log-probs or values are computed."""
        tokens, total = len(position), 0.0
        for window, each in self.pair.items():
            keys = position + 1 if window is None else (position + 1).clamp(max=window)
            total += each * float(keys.sum()) * (3 if backward else 1)
        total += tokens * self.body + predicted * self.head
        if backward:  # the gradients of the inputs, and of the trained weights
            total += tokens * (self.body + self.body_trained) + predicted * (self.head + self.head_trained)
        return total


def _attention(text: "PretrainedConfig") -> dict[int | None, float]:
    """Return the operations of a query with one key, by the window of the layers."""
    latent = None
    if getattr(text, "qk_nope_head_dim", None):  # latent attention
        latent = text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    kinds = list(kinds or ["full_attention"] * text.num_hidden_layers)
    pair: dict[int | None, float] = {}
    for kind, heads in zip(kinds, heads_of(text), strict=False):
        if "attention" not in kind or "linear" in kind:
            continue
        local = "sliding" in kind or "chunked" in kind
        reach = getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None)
        window = reach if local else None
        pair[window] = pair.get(window, 0.0) + 2 * heads.queries * (latent or 2 * heads.size)
    return pair


# Products of dense matrices in bfloat16, without sparsity, in TFLOP/s, from the vendors' data sheets. The first name
# that a device's name contains counts.
_PEAKS = {
    "GB300": 2500, "GB200": 2500, "B300": 2250, "B200": 2250,
    "GH200": 989, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H800": 989, "H20": 148,
    "A100": 312, "A800": 312, "A10G": 70, "A10": 125, "A30": 165, "A40": 150, "L40S": 362, "L40": 181, "L4": 121,
    "RTX 5090": 210, "RTX 4090": 165, "RTX 3090": 71, "RTX A6000": 155, "RTX 6000 Ada": 364,
    "MI355X": 2300, "MI325X": 1307, "MI300X": 1307, "MI250X": 383,
}  # fmt: skip


def peak_tflops(device: str, precision: str) -> float | None:
    """Return the peak of a GPU by its name; None where it is not in the table, or computes in another precision than
    bfloat16."""
    if precision != "bfloat16":
        return None
    return next((float(peak) for name, peak in _PEAKS.items() if re.search(rf"\b{name}\b", device)), None)
