"""The engine of models that keep more than a KV cache, or that don't use transformers' attention interface. It samples
with transformers' cache classes.

Slower than ``EngineModel``: prompts are computed one at a time, each whole, and only rows of one prompt run together.
So that a row doesn't depend on other rows, to the bit, rows always run ``WIDTH`` at a time; one by one if there are
experts, because the size of their products depends on the number of tokens that chose them.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from whet.base.errors import ConfigError
from whet.engines.torch.engine_model import EngineModel, Rows, cannot_sample, unsupported_layers
from whet.engines.torch.prefix import Prefix
from whet.engines.torch.tiles import ROWS
from whet.models.attention.states import fork, new_cache
from whet.models.images import Embedded, embedded_parts
from whet.models.moe.experts import experts_of, use_grouped_experts

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

    from whet.models.image_processor import ImageProcessor

log = logging.getLogger(__name__)

WIDTH = 8


@dataclass(slots=True)
class Snapshot(Prefix):
    """The state of transformers' cache after a prompt. Never changes once filled."""

    cache: dict[str, "Cache"] = field(default_factory=dict)

    def first(self, length: int) -> Prefix:
        """Return an empty prefix, because a state can't be truncated."""
        return Prefix(0)


@dataclass(slots=True, eq=False)
class _Bunch:
    """Rows that continue one prompt together."""

    cache: dict[str, "Cache"]
    shift: int  # of the prompt; see ``Prefix``
    taken: int = 0


class StateRows:
    """Rows in flight, each at a place in a bunch. A place whose row has left is still computed and ignored."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.places: list[tuple[_Bunch, int]] = []  # the place of each row

    def join(self, prefixes: Iterable[Prefix]) -> None:
        """Add rows at the end, in this order."""
        open_ones: dict[int, _Bunch] = {}
        for prefix in prefixes:
            assert isinstance(prefix, Snapshot)
            bunch = open_ones.get(id(prefix))
            if bunch is None or bunch.taken == self.width:
                bunch = open_ones[id(prefix)] = _Bunch(fork(prefix.cache, [0] * self.width), prefix.shift)
            self.places.append((bunch, bunch.taken))
            bunch.taken += 1

    def leave(self, row: int) -> None:
        """Drop a finished row. The last row takes its number."""
        self.places[row] = self.places[-1]
        self.places.pop()

    def commit(self, counts: Sequence[int]) -> None:
        """Do nothing: a state can't be taken back, so each row was fed one token."""

    def bunches(self, tokens: Sequence[int]) -> dict[_Bunch, list[int]]:
        """Return each bunch with the next token at each of its places."""
        fed: dict[_Bunch, list[int]] = {}
        for (bunch, place), token in zip(self.places, tokens, strict=True):
            fed.setdefault(bunch, [0] * self.width)[place] = token
        return fed


def open_engine(model: "PreTrainedModel", pack: bool = True, images: "ImageProcessor | None" = None) -> EngineModel:
    """Return the engine for a model, which reads ``images`` with this processor. Raises ``ConfigError`` if there is
    none."""
    if not unsupported_layers(model.config):
        return EngineModel(model, pack, images)
    return CachedModel(model, pack, images)


class CachedModel(EngineModel):
    """An ``EngineModel`` with transformers' caches; see the module's docstring."""

    reuses_prefixes = False  # states are large and of constant size, so a limit in tokens would not bound memory

    def _prepare(self, model: "PreTrainedModel") -> None:
        if (why := cannot_sample(model.config)) is not None:
            raise ConfigError(why)
        _warn_once(type(model).__name__)
        use_grouped_experts(model)
        self.width = 1 if any(True for _ in experts_of(model)) else WIDTH

    def open_rows(self, capacity: int) -> tuple[Rows, Callable[[Sequence[Sequence[int]]], Tensor]]:
        rows = StateRows(self.width)
        return rows, partial(self._decode, rows)

    @torch.no_grad()
    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        prefixes: Sequence[Prefix] | None = None,
        images: Sequence[Sequence[str]] | None = None,
    ) -> list[tuple[Prefix, Tensor]]:
        """Return the state after each prompt, and the logits [V] after its last token. ``prefixes`` are not used."""
        states: list[tuple[Prefix, Tensor]] = []
        for prompt, urls in zip(prompts, images or [()] * len(prompts), strict=True):
            state, shift, inputs = new_cache(self.model), 0, None
            if self.images is not None and urls:
                whole = range(len(prompt))
                inputs, (shift,) = embedded_parts(self.model, [prompt], [whole], [urls], self.images)
            (logits,) = self._run([list(prompt)], state, 0, inputs)
            states.append((Snapshot(len(prompt), cache=state, shift=shift), logits))
        return states

    def score_decode(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """See ``EngineModel``. Runs one token at a time, because states can't be truncated."""
        (prefix, logits), *_ = self.prefill([prompt])
        rows, feed = self.open_rows(1)
        rows.join([prefix])
        scores = []
        for token in tokens:
            scores.append(float(torch.log_softmax(logits.double(), dim=-1)[token]))
            logits = feed([[token]])[0]
        return scores

    @torch.no_grad()
    def _decode(self, rows: StateRows, fed: Sequence[Sequence[int]]) -> Tensor:
        """Feed each row its one token; return the logits [rows or more, V] of the next."""
        bunches = rows.bunches([token for (token,) in fed])
        results = {
            bunch: self._run([[t] for t in tokens], bunch.cache, bunch.shift) for bunch, tokens in bunches.items()
        }
        logits = [results[bunch][place] for bunch, place in rows.places]
        return torch.stack(logits + logits[-1:] * (-len(logits) % ROWS))

    def _run(
        self, rows: list[list[int]], state: dict[str, "Cache"], shift: int = 0, embedded: Embedded | None = None
    ) -> Tensor:
        """Return the logits [rows, V] after the last token of each row. ``shift``: see ``Prefix``; ``embedded``: the
        inputs of the only row, instead of its tokens."""
        inputs: dict[str, Any] = {"input_ids": torch.tensor(rows, device=self.device)}
        if self.images is not None and self.images.with_grids:  # otherwise the model remembers an earlier prompt's
            (cache,) = state.values()
            place = torch.arange(len(rows[0]), device=self.device) + cache.get_seq_length() + shift
            inputs["position_ids"] = place.expand(3, len(rows), -1)
        if embedded is not None:
            inputs = embedded.arguments(torch.arange(len(rows[0]), device=self.device)[None])
        last: Tensor = self.model(**inputs, use_cache=True, logits_to_keep=1, **state).logits[:, -1]
        return last.clone()


@cache
def _warn_once(name: str) -> None:
    log.warning(
        "the torch generator samples %s with transformers' own cache, which is slower: prompts are computed one at a "
        "time, and only answers to one prompt together",
        name,
    )
