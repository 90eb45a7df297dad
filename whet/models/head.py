"""The vocabulary head and its log-softmax as one chunked operation: logits exist for a few tokens at a time only.

What flows through: hidden states of the tokens that predict, [T, H], and the output matrix, [V, H]; out come the
log-probs of given tokens under a ``Distribution``. The backward pass computes each chunk's logits again, which costs
an eighth of the head's work and keeps memory independent of tokens x vocabulary. Knows no batch and no learner.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from whet.errors import WhetError
from whet.models.distribution import least_logit, truncates
from whet.models.forest_attention import NAME, ForestLayout, unwrapped
from whet.types import Distribution

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK = 256  # tokens whose logits exist at once


@dataclass(slots=True, frozen=True)
class Head:
    """How a model's final hidden states become logits: ``softcap * tanh(scale * (W h + bias) / softcap)``."""

    weight: Tensor  # [V, H]; the model's own parameter, also when it is tied to the embeddings
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, H] -> [T, V], float32 or wider; products in autocast's type where it is on."""
        raw = _product(hidden, self.weight, self.bias)
        return _finish(raw, self.scale, self.softcap)


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    distribution: Distribution,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    with_entropy: bool = False,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of ``targets`` and, when asked, entropies, under the truncated and tempered distribution.

    hidden [T, H], weight [V, H], targets [T] -> ([T], [T] or None), float32 (float64 for float64 inputs). Under
    truncation a target is always inside the support, and the support counts as constant in the backward pass.
    """
    logprobs, entropy = _TokenLogprobs.apply(
        hidden, weight, bias, targets[:, None], distribution, scale, softcap, with_entropy, chunk
    )
    return logprobs[:, 0], entropy if with_entropy else None


def ids_logprobs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    distribution: Distribution,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk: int = CHUNK,
) -> Tensor:
    """Log-probs of K given tokens at each place, for distillation. ids [T, K] -> [T, K]"""
    logprobs: Tensor
    logprobs, _ = _TokenLogprobs.apply(hidden, weight, bias, ids, distribution, scale, softcap, False, chunk)
    return logprobs


@torch.no_grad()
def topk_logprobs(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    distribution: Distribution,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens at each place and their log-probs: a teacher's answer. -> ([T, k] int64, [T, k])"""
    ids, logprobs = [], []
    for piece in hidden.split(chunk):
        logits = _finish(_product(piece, weight, bias), scale, softcap) / distribution.temperature
        if truncates(distribution):
            logits = logits.masked_fill(logits < least_logit(logits, distribution), float("-inf"))
        values, places = logits.topk(k, dim=-1)
        ids.append(places)
        logprobs.append(values - logits.logsumexp(-1, keepdim=True))
    if not ids:
        return hidden.new_zeros((0, k), dtype=torch.long), hidden.new_zeros((0, k))
    return torch.cat(ids), torch.cat(logprobs)


def head_of(model: nn.Module) -> Head:
    """The head of a Hugging Face causal language model (or a PEFT wrap of it).

    Raises ``WhetError`` where it is not one linear map with the usual scaling and soft cap.
    """
    inner = unwrapped(model)
    linear = inner.get_output_embeddings()
    if type(linear) is not nn.Linear:
        raise WhetError(
            f"{type(inner).__name__}: the head is {type(linear).__name__}, not one plain Linear, "
            "so its log-probs can't be computed in chunks. Leave the head out of LoRA's target_modules, or use a model with a plain head"
        )
    text = inner.config.get_text_config()
    scale = 1.0
    if getattr(text, "logits_scaling", None):
        scale = text.logits_scaling if text.model_type == "hyperclovax" else 1.0 / text.logits_scaling
    elif getattr(text, "logit_scale", None):
        scale = text.logit_scale
    elif getattr(text, "lm_head_multiplier", None):
        scale = text.lm_head_multiplier
    return Head(linear.weight, linear.bias, float(scale), getattr(text, "final_logit_softcapping", None))


@torch.no_grad()
def check_head(model: "PreTrainedModel") -> None:
    """Compare the head found by ``head_of`` with the model's own logits on three tokens.

    Raises ``WhetError`` when they differ: an architecture may do something to its logits that its config doesn't say.
    """
    head = head_of(model)
    tokens = torch.tensor([[1, 2, 3]], device=head.weight.device) % head.weight.shape[0]
    extra = {"whet_forest": ForestLayout.of_one(3, tokens.device)} if model.config._attn_implementation == NAME else {}
    training = model.training
    model.eval()
    seen: dict[str, Tensor] = {}
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, args: seen.update(hidden=args[0]))
    try:
        theirs = model(input_ids=tokens, use_cache=False, **extra).logits[0].float()
    finally:
        hook.remove()
        model.train(training)
    ours = head.logits(seen["hidden"][0]).float() if "hidden" in seen else torch.full_like(theirs, float("nan"))
    tolerance = 1e-4 if theirs.dtype == head.weight.dtype else 0.02
    if not torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max())):
        raise WhetError(
            f"{type(model).__name__}: its logits are not its head's product with the known scalings "
            f"(they differ by {float((ours - theirs).abs().max()):.3g}), so log-probs would be wrong; "
            "this architecture is not supported yet"
        )


def _product(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        compute = torch.get_autocast_dtype(kind)
        with torch.autocast(kind, enabled=False):
            raw = hidden.to(compute) @ weight.to(compute).T
    else:
        raw = hidden.to(weight.dtype) @ weight.T
    raw = raw if raw.dtype == torch.float64 else raw.float()
    return raw if bias is None else raw + bias


def _finish(raw: Tensor, scale: float, softcap: float | None) -> Tensor:
    if scale != 1.0:
        raw = raw * scale
    return raw if softcap is None else torch.tanh(raw / softcap) * softcap


class _TokenLogprobs(torch.autograd.Function):
    """Forward and backward over chunks of tokens. Saves inputs and one normaliser per token, never a logit."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        distribution: Distribution,
        scale: float,
        softcap: float | None,
        with_entropy: bool,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        kind = hidden.device.type
        ctx.autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        ctx.settings = (distribution, scale, softcap, with_entropy, chunk)
        compute = ctx.autocast or weight.dtype
        with torch.autocast(kind, enabled=False):
            narrow = weight.to(compute)
            wide = torch.float64 if compute == torch.float64 else torch.float32
            logprobs = torch.empty(ids.shape, dtype=wide, device=hidden.device)
            entropy = torch.zeros(len(hidden), dtype=wide, device=hidden.device)
            normaliser = torch.empty(len(hidden), dtype=wide, device=hidden.device)
            for start in range(0, len(hidden), chunk):
                part = slice(start, start + chunk)
                logits, _ = _chunk_logits(hidden[part].to(compute), narrow, bias, ids[part], ctx.settings)
                normaliser[part] = logits.logsumexp(-1)
                logprobs[part] = logits.gather(-1, ids[part]) - normaliser[part, None]
                if with_entropy:
                    own = logits.sub_(normaliser[part, None])
                    entropy[part] = -(own.exp() * own.clamp_(min=torch.finfo(wide).min)).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, ids, normaliser, entropy)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, normaliser, entropy = ctx.saved_tensors
        distribution, scale, _, with_entropy, chunk = ctx.settings
        of_logprobs, of_entropy = grads
        compute = ctx.autocast or weight.dtype
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if wants_hidden else None
        d_weight = torch.zeros(weight.shape, dtype=normaliser.dtype, device=weight.device) if wants_weight else None
        d_bias = torch.zeros(bias.shape, dtype=normaliser.dtype, device=bias.device) if wants_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            narrow = weight.to(compute)
            for start in range(0, len(hidden), chunk):
                part = slice(start, start + chunk)
                rows = hidden[part].to(compute)
                logits, slope = _chunk_logits(rows, narrow, bias, ids[part], ctx.settings, with_slope=True)
                own = logits.sub_(normaliser[part, None])
                if with_entropy:
                    shares = own.exp()
                    finite = own.clamp_(min=torch.finfo(own.dtype).min)
                    d_logits = finite.add_(entropy[part, None]).mul_(-of_entropy[part, None])
                    d_logits.sub_(of_logprobs[part].sum(-1, keepdim=True)).mul_(shares)
                else:
                    d_logits = own.exp_().mul_(-of_logprobs[part].sum(-1, keepdim=True))
                d_logits.scatter_add_(-1, ids[part], of_logprobs[part])
                if slope is not None:
                    d_logits.mul_(slope)
                if scale != 1.0 or distribution.temperature != 1.0:
                    d_logits.mul_(scale / distribution.temperature)
                if d_bias is not None:
                    d_bias += d_logits.sum(0)
                d_raw = d_logits.to(compute)
                if d_hidden is not None:
                    d_hidden[part] = d_raw @ narrow
                if d_weight is not None:
                    d_weight += d_raw.T @ rows
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            *[None] * 6,
        )


def _chunk_logits(
    rows: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, settings: Any, with_slope: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Logits of the distribution, -inf outside its support, and the soft cap's slope where asked for."""
    distribution, scale, softcap, _, _ = settings
    raw = rows @ weight.T
    logits = raw if raw.dtype == torch.float64 else raw.float()
    if bias is not None:
        logits = logits + bias
    if scale != 1.0:
        logits = logits * scale
    slope = None
    if softcap is not None:
        capped = torch.tanh(logits / softcap)
        slope = 1.0 - capped * capped if with_slope else None
        logits = capped * softcap
    if distribution.temperature != 1.0:
        logits = logits / distribution.temperature
    if truncates(distribution):
        outside = logits < least_logit(logits, distribution)
        outside.scatter_(-1, ids, False)
        logits = logits.masked_fill_(outside, float("-inf"))
    return logits, slope
