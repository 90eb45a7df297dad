"""A transformers model as the engine of a generator: it runs prefill and decode steps, from token ids to logits."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from whet.base.errors import ConfigError
from whet.core.expert_ids import Ids
from whet.engines.torch import decode_attention
from whet.engines.torch.decode_attention import DecodeCache
from whet.engines.torch.loading import Loading
from whet.engines.torch.prefix import Prefill, Prefix
from whet.engines.torch.tiles import ROWS
from whet.models.attention.forest import decoder_of, select_in_decoder, supports_forest
from whet.models.attention.states import supports_cached_decoding
from whet.models.images import Embedded, embedded_parts
from whet.models.moe.fixed_experts import use_fixed_experts
from whet.models.moe.routing import RouteRecorder, cannot_replay
from whet.models.packed_linear import pack_linears
from whet.models.row_activations import fix_activations
from whet.models.row_sizes import fix_rows
from whet.processes.machine import memory_is_short, return_freed_memory

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from whet.models.image_processor import ImageProcessor

_ATTENDS_TWICE = {"diffllama", "hrm_text"}


class OpenEngine(Loading):
    """An engine's model during a refit. See ``OpenModel``."""

    def __init__(self, engine: "EngineModel") -> None:
        super().__init__(engine.model)
        self._engine = engine

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self._targets[name].detach()) for name in self._written.values())

    def score_decode(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
        self._engine.weights_changed()
        return self._engine.score_decode(prompt, tokens)


class Rows(Protocol):
    """Completions in flight, ``0 .. n - 1``."""

    def join(self, prefixes: Iterable[Prefix]) -> None:
        """Add rows that continue prompts, at the end and in this order."""
        ...

    def leave(self, row: int) -> None:
        """Drop a row; the last one takes its number."""
        ...

    def commit(self, counts: Sequence[int]) -> None:
        """End a forward pass: of the tokens that each row was fed the first ``counts`` stay."""
        ...


class EngineModel:
    """Runs prefill and decode steps of ``model``, which it modifies: attention is replaced, linear layers are
    packed and compute fixed numbers of rows."""

    reuses_prefixes = True  # use the prefix cache

    def __init__(self, model: "PreTrainedModel", pack: bool = True, images: "ImageProcessor | None" = None) -> None:
        self._prepare(model)
        self.model = model.eval().requires_grad_(False)
        self.layers: int = model.config.get_text_config().num_hidden_layers
        self.device = model.get_input_embeddings().weight.device
        self.vocab: int = model.get_input_embeddings().num_embeddings
        self.images = images  # of a model that reads images
        self.linears = pack_linears(model) if pack else []
        fix_rows(model)
        fix_activations(model)
        self.recorder: RouteRecorder | None = None
        self._released: list[tuple[torch.UntypedStorage, int]] = []  # and sizes in bytes
        self.experts: Ids | None = None  # of the last forward pass's tokens, if recorded

    def _prepare(self, model: "PreTrainedModel") -> None:
        if (why := unsupported_layers(model.config)) is not None:
            raise ConfigError(_unsupported(type(model).__name__, why))
        decode_attention.register()
        select_in_decoder(model, decode_attention.NAME)
        use_fixed_experts(model)

    def record_experts(self) -> None:
        """Record ``experts``, and the experts of prompts, from now on. Raises ``ConfigError`` if that isn't
        possible."""
        if (why := cannot_replay(self.model.config)) is not None:
            raise ConfigError(f"{why}; leave it out")
        self.recorder = RouteRecorder(self.model)

    def open_rows(self, capacity: int) -> tuple[Rows, Callable[[Sequence[Sequence[int]]], Tensor]]:
        """Return an empty set of up to ``capacity`` rows, and a function that feeds each row its tokens and returns the
        logits [tokens or more, V] after each."""
        cache = DecodeCache(capacity, self.device)
        return cache, partial(self.decode, cache)

    def open(self) -> OpenEngine:
        """Return the model, for loading new weights."""
        for storage, size in self._released:
            storage.resize_(size)
        self._released = []
        return OpenEngine(self)

    @property
    def released(self) -> bool:
        return bool(self._released)

    def release(self, return_memory: bool | None = None) -> None:
        """Free the weights and data derived from them, and return memory to the system; None: if it is short. The model
        can be used again once it is opened and all weights are loaded."""
        self.weights_changed()
        if not self._released:
            tensors = self.model.state_dict(keep_vars=True).values()
            storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
            self._released = [(storage, storage.nbytes()) for storage in storages.values()]
            for storage, _ in self._released:
                storage.resize_(0)
            if memory_is_short() if return_memory is None else return_memory:
                return_freed_memory()

    def weights_changed(self) -> None:
        """Drop data derived from old weights; must be called after weights were written in any way."""
        for linear in self.linears:
            linear.refresh()

    @torch.no_grad()
    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        prefixes: Sequence[Prefix] | None = None,
        images: Sequence[Sequence[str]] | None = None,
    ) -> list[tuple[Prefix, Tensor]]:
        """Return the KV cache of each prompt and the logits [V] after its last token, in one forward pass over the
        tokens after each prompt's cached prefix, given in ``prefixes``. That prefix must not include the last token.
        ``images``: the data URLs of each prompt's images."""
        filled, logits = self._fill(prompts, prefixes or [Prefix(0)] * len(prompts), images, logits=True)
        return [(prefix, row.clone()) for prefix, row in zip(filled, logits, strict=False)]

    def _fill(
        self,
        prompts: Sequence[Sequence[int]],
        prefixes: Sequence[Prefix],
        images: Sequence[Sequence[str]] | None,
        logits: bool,
    ) -> tuple[list[Prefix], Tensor]:
        """Return the KV cache of each prompt, and the ``logits`` [prompts or more, V], or none of them."""
        lengths = [len(prompt) for prompt in prompts]
        new = [range(prefix.length, length) for prefix, length in zip(prefixes, lengths, strict=True)]
        padding = [0] * (-sum(map(len, new)) % ROWS)
        tokens = [prompt[i] for prompt, part in zip(prompts, new, strict=True) for i in part] + padding
        positions = [position for part in new for position in part] + padding
        last = (torch.tensor([len(part) for part in new]).cumsum(0) - 1).tolist()
        embedded, shifts = None, [0] * len(prompts)
        if self.images is not None and images is not None and any(images):
            embedded, shifts = embedded_parts(self.model, prompts, new, images, self.images)
        state = Prefill(lengths, prefixes, None if embedded is None else embedded.ahead)
        keep = last + last[-1:] * (-len(last) % ROWS) if logits else []
        rows = self._forward(state, tokens, positions, keep, embedded)
        if any(len(prefix.keys) != self.layers for prefix in state.prefixes):
            raise ConfigError(
                _unsupported(type(self.model).__name__, "not every layer is attention with its own keys and values")
            )
        for prefix, shift in zip(state.prefixes, shifts, strict=True):
            prefix.shift = shift
        if self.experts is not None:
            parts = np.split(self.experts, np.cumsum([len(part) for part in new]))
            for prefix, old, ids in zip(state.prefixes, prefixes, parts, strict=False):
                prefix.experts = ids if old.experts is None else np.concatenate([old.experts, ids])
        return state.prefixes, rows

    @torch.no_grad()
    def decode(self, cache: DecodeCache, fed: Sequence[Sequence[int]]) -> Tensor:
        """Feed each active row its tokens; return the logits [tokens rounded up to a multiple of 16, V] after each."""
        total, positions = cache.begin([len(tokens) for tokens in fed])
        tokens = [token for row in fed for token in row]
        return self._forward(cache, tokens + [0] * (total - len(tokens)), positions, None)

    def _forward(
        self,
        state: decode_attention.Cache,
        tokens: list[int],
        positions: list[int],
        keep: list[int] | None,
        embedded: Embedded | None = None,
    ) -> Tensor:
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor([tokens], device=self.device) if embedded is None else None,
            "position_ids": torch.tensor([positions], device=self.device),
        }
        if embedded is not None:
            inputs |= embedded.arguments(inputs["position_ids"])
        inputs |= {"use_cache": False, "whet_cache": state}
        chosen = 0 if keep is None else torch.tensor(keep, dtype=torch.long, device=self.device)
        if embedded is not None and embedded.deep:  # only the decoder takes features for several layers
            hidden = decoder_of(self.model)(**inputs).last_hidden_state[0]
            logits: Tensor = self.model.get_output_embeddings()(hidden[chosen])
        else:
            logits = self.model(**inputs, logits_to_keep=chosen).logits[0]
        self.experts = None if self.recorder is None else self.recorder.take()
        return logits

    @torch.no_grad()
    def score_decode(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Return log-probs (temperature 1) of ``tokens`` after ``prompt``, computed by the decode path: in one step,
        with a row for each token, which is fed the token before it."""
        text = [*prompt, *tokens]
        (prefix,), _ = self._fill([text], [Prefix(0)], None, logits=False)
        rows, feed = self.open_rows(len(tokens))
        fed = range(len(prompt) - 1, len(text) - 1)
        rows.join(prefix.first(place) for place in fed)
        logits = feed([[text[place]] for place in fed])[: len(tokens)].double()
        return logits.log_softmax(dim=-1)[range(len(tokens)), list(tokens)].tolist()


def unsupported_layers(config: "PretrainedConfig") -> str | None:
    """Return a description of a model's layers other than replaceable attention with a KV cache, or None."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"it has layers of type {', '.join(sorted(kinds))}"
    if getattr(text, "num_kv_shared_layers", 0):
        return "some of its layers share the keys and values of other layers"
    if text.model_type in _ATTENDS_TWICE:
        return "its layers attend more than once"
    return None if supports_forest(config) else "transformers cannot replace its attention (AttentionInterface)"


def cannot_sample(config: "PretrainedConfig") -> str | None:
    """Return why models of this config can't be sampled in this process, or None."""
    why = unsupported_layers(config)
    if why is None or supports_cached_decoding(config):
        return None
    return _unsupported(
        config.model_type, f"{why}, and it is not listed as continuing exactly from transformers' cache"
    )


def _unsupported(name: str, why: str) -> str:
    return f"the torch generator cannot run {name}: {why}. It needs another generator"
