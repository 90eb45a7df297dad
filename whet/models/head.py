"""The heads of a model: the vocabulary head with its log-softmax as one operation, and a scalar head.

The vocabulary head takes hidden states of the predicting tokens, [T, H], and the output matrix, [V, H], and returns the
log-probs of given tokens under a ``Distribution``. Logits exist for a few tokens and words at a time only (on a CPU
in float32, up to a limit), so memory does not grow with tokens x vocabulary. This module also finds the head of any
causal language model and checks it.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from whet.base.errors import WhetError
from whet.base.seeds import derive_seed
from whet.core.types import Distribution
from whet.models.attention.forest import NAME, unwrapped
from whet.models.attention.layout import ForestLayout
from whet.models.distribution import least_logit, truncates
from whet.models.shards import WHOLE, Vocabulary
from whet.models.tiled_logprobs import HeadSettings, TokenLogprobs, tiles_on

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(slots=True, frozen=True)
class Head:
    """The map from final hidden states to logits: ``softcap * tanh(scale * (W h + bias) / softcap)``.

    Its methods take hidden states [T, H] and return float32 (float64 for float64 inputs), with products in autocast's
    dtype if it is enabled. If the ``vocabulary`` is sharded, ``weight`` and ``bias`` are this rank's rows; hidden
    states, targets and results are the same on all its ranks.
    """

    weight: Tensor  # [V, H]; the model's parameter, even if it is tied to the embeddings
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None
    vocabulary: Vocabulary = WHOLE.vocabulary

    def local(self, vocabulary: Vocabulary) -> "Head":
        """Return this rank's rows of a head that is sharded like ``vocabulary``."""
        bias = None if self.bias is None else vocabulary.local(self.bias)
        return replace(self, weight=vocabulary.local(self.weight), bias=bias, vocabulary=vocabulary)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits, [T, V]."""
        return self._logits(hidden, Distribution())

    def token_logprobs(
        self,
        hidden: Tensor,
        targets: Tensor,
        distribution: Distribution,
        *,
        with_entropy: bool = False,
        chunk: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the log-probs of ``targets`` [T] and, if requested, entropies, [T] each, under the truncated and
        tempered distribution. A target is always inside the truncation's support, which counts as constant in the
        backward pass."""
        logprobs, entropy = self._tiled(hidden, targets[:, None], distribution, with_entropy, chunk)
        return logprobs[:, 0], entropy if with_entropy else None

    def ids_logprobs(
        self, hidden: Tensor, ids: Tensor, distribution: Distribution, *, chunk: int | None = None
    ) -> Tensor:
        """Return the log-probs of K given tokens at each position, for distillation. ids [T, K] -> [T, K]"""
        return self._tiled(hidden, ids, distribution, False, chunk)[0]

    @torch.no_grad()
    def topk_logprobs(
        self, hidden: Tensor, k: int, distribution: Distribution, *, below: int | None = None, chunk: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the k most likely tokens at each position and their log-probs, as a teacher does: ([T, K] int64, [T,
        K]).

        Only ids below ``below`` are returned, but all tokens share the probability mass; K is k, or the number of
        tokens if that is smaller.
        """
        ids, logprobs = [], []
        for piece in hidden.split(chunk or tiles_on(hidden.device).sorted):
            logits = self.vocabulary.all_gather(self._logits(piece, distribution))
            if truncates(distribution):
                logits = logits.masked_fill_(logits < least_logit(logits, distribution), float("-inf"))
            named = logits[:, :below]
            values, places = named.topk(min(k, named.shape[1]), dim=-1)
            ids.append(places)
            logprobs.append(values - logits.logsumexp(-1, keepdim=True))
        return torch.cat(ids), torch.cat(logprobs)

    def _settings(self, distribution: Distribution) -> HeadSettings:
        return HeadSettings(distribution, self.scale, self.softcap, self.vocabulary)

    def _logits(self, hidden: Tensor, distribution: Distribution) -> Tensor:
        kind = hidden.device.type
        compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.weight.dtype
        with torch.autocast(kind, enabled=False):
            return self._settings(distribution).logits(hidden.to(compute), self.weight.to(compute), self.bias)[0]

    def _tiled(
        self, hidden: Tensor, ids: Tensor, distribution: Distribution, with_entropy: bool, chunk: int | None
    ) -> tuple[Tensor, Tensor]:
        keeps = hidden.device.type == "cpu" and torch.is_grad_enabled()
        result: tuple[Tensor, Tensor] = TokenLogprobs.apply(
            hidden, self.weight, self.bias, ids, self._settings(distribution), with_entropy, chunk, keeps
        )
        return result


def head_of(model: nn.Module) -> Head:
    """Return the head of a Hugging Face causal language model (or its PEFT wrapper).

    Raises ``WhetError`` if it is not one linear map with the usual scaling and soft cap.
    """
    inner = unwrapped(model)
    linear = inner.get_output_embeddings()
    if type(linear) is not nn.Linear:
        raise WhetError(
            f"{type(inner).__name__}: the head is {type(linear).__name__}, not one plain Linear, so its "
            "log-probs can't be computed in tiles. Leave the head out of LoRA's target_modules, or use a model with a "
            "plain head"
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


def check_finite(numbers: Tensor, model: "PreTrainedModel") -> None:
    """Raise ``WhetError`` if what the model computed is not finite."""
    if not numbers.isfinite().all():
        raise WhetError(
            f"the model {model.name_or_path or type(model).__name__} computes numbers that are not finite: its weights "
            "have NaN or infinite numbers, or are too large for their type. Copy or download the model again"
        )


@torch.no_grad()
def check_head(model: "PreTrainedModel") -> None:
    """Compare the head returned by ``head_of`` with the model's logits on three tokens.

    Raises ``WhetError`` if they differ: an architecture may transform its logits in a way that is not in its config.
    """
    head = head_of(model)
    tokens = torch.tensor([[1, 2, 3]], device=head.weight.device) % head.weight.shape[0]
    extra = (
        {"whet_forest": ForestLayout.of_lengths([3], tokens.device)}
        if model.config.get_text_config()._attn_implementation == NAME
        else {}
    )
    training = model.training
    model.eval()
    seen: dict[str, Tensor] = {}
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, args: seen.update(hidden=args[0]))
    try:
        theirs = model(input_ids=tokens, use_cache=False, **extra).logits[0].float()
    finally:
        hook.remove()
        model.train(training)
    check_finite(theirs, model)
    ours = head.logits(seen["hidden"][0]).float() if "hidden" in seen else torch.full_like(theirs, float("nan"))
    tolerance = 1e-4 if theirs.dtype == head.weight.dtype else 0.02
    if not torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max())):
        raise WhetError(
            f"{type(model).__name__}: its logits differ from its head's product with the known scalings "
            f"(by {float((ours - theirs).abs().max()):.3g}), so log-probs would be wrong; "
            "this architecture is not supported yet"
        )


class ValueHead(nn.Module):
    """One linear map to a number, kept in float32, because values are regressed and bfloat16 has only 8 bits of
    mantissa. It has no bias, like the heads of transformers' sequence classifiers, so that a reward model can be
    exported as one."""

    def __init__(self, hidden_size: int, *, seed: int = 0, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1, bias=False, device=device)
        generator = torch.Generator().manual_seed(derive_seed("value head", seed))
        with torch.no_grad():
            self.linear.weight.copy_(torch.randn(1, hidden_size, generator=generator) / (hidden_size + 1))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the values. [T, H] -> [T]"""
        with torch.autocast(hidden.device.type, enabled=False):
            values: Tensor = self.linear(hidden.to(self.linear.weight.dtype)).squeeze(-1)
        return values
