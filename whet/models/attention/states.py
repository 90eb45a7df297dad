"""Forests of segments for models whose layers carry a state along the row: recurrent, convolutional and linear
attention layers, and attention that doesn't use transformers' interface. A segment is run once, and its children
continue from copies of its state in transformers' cache. Gradients flow through the copies."""

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whet.models.attention.layout import bins_of

if TYPE_CHECKING:
    from transformers import Cache, PretrainedConfig, PreTrainedModel

# Text models that continue correctly from a cache, with one token or many.
_FORKED = {
    "axk2", "biogpt", "bloom", "codegen", "deepseek_v32", "doge", "falcon", "falcon_h1", "glm_moe_dsa", "gpt_neo",
    "gpt_neox_japanese", "gptj", "granitemoehybrid", "hy_v4", "inkling_text", "lfm2", "lfm2_moe", "llama4_text",
    "mamba2", "mpt", "nemotron", "nemotron_h", "olmo_hybrid", "phimoe", "qwen3_5_moe_text", "qwen3_5_text",
    "qwen3_next", "stablelm", "xglm", "zamba2", "zaya",
}  # fmt: skip
# These continue correctly with one token at a time only: with more, Mamba's first scan ignores the state. All other
# models share prompts with forest attention.
_STEPPED = {"falcon_mamba", "jamba", "mamba", "diffllama", "gemma3n_text", "hrm_text"}


def supports_prefix_fork(config: "PretrainedConfig") -> bool:
    """Return whether prompts can be shared by copying the state at their end."""
    return config.get_text_config().model_type in _FORKED


def supports_cached_decoding(config: "PretrainedConfig") -> bool:
    """Return whether the model's cache can be used for sampling."""
    return supports_prefix_fork(config) or config.get_text_config().model_type in _STEPPED


def new_cache(model: nn.Module) -> dict[str, "Cache"]:
    """Return an empty cache under its argument name in ``model``."""
    from transformers import DynamicCache

    name = "cache_params" if "cache_params" in inspect.signature(model.forward).parameters else "past_key_values"
    return {name: DynamicCache(config=model.config)}


def tensors_of(cache: "Cache") -> Iterator[Tensor]:
    """Yield the tensors of a cache."""
    for layer in cache.layers:
        for value in vars(layer).values():
            yield from (x for x in (value.values() if isinstance(value, dict) else [value]) if isinstance(x, Tensor))


def fork(cache: dict[str, "Cache"], rows: list[int]) -> dict[str, "Cache"]:
    """Return copies of a cache's ``rows``, which the model may write to; the cache itself doesn't change."""
    ((name, old),) = cache.items()
    new: Any = copy.copy(old)
    new.layers = [copy.copy(layer) for layer in old.layers]
    for layer in new.layers:
        vars(layer).update({name: dict(value) for name, value in vars(layer).items() if isinstance(value, dict)})
    device = next((layer.device for layer in new.layers if getattr(layer, "device", None) is not None), None)
    new.reorder_cache(torch.tensor(rows, device=device))
    for layer in new.layers:
        if hasattr(layer, "is_recurrent_states_initialized"):
            # The layer then stores new states, instead of overwriting tensors that the backward pass needs.
            layer.is_recurrent_states_initialized = dict.fromkeys(layer.recurrent_states, False)
    return {name: new}


@dataclass(slots=True)
class _Run:
    """Tokens that one row of a forward pass computes, and the runs that continue from there."""

    tokens: list[int]
    children: list["_Run"] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class Inputs:
    """The inputs of a decoder for the N tokens of a batch."""

    tokens: Tensor  # [N]
    embeddings: Tensor | None = None  # [N, H], in place of the tokens' own
    positions: Tensor | None = None  # [3, N]; None: the tokens are counted

    def of(self, runs: list["_Run"], least: int) -> dict[str, Tensor]:
        """Return the arguments of a decoder for rows, padded to the longest or to ``least`` tokens."""
        picked = [torch.tensor(run.tokens, device=self.tokens.device) for run in runs]

        def rows(column: Tensor) -> Tensor:
            padded = nn.utils.rnn.pad_sequence([column.index_select(0, row) for row in picked], batch_first=True)
            short = max(least - padded.shape[1], 0)
            return F.pad(padded, (0, 0) * (column.dim() - 1) + (0, short))

        if self.embeddings is None:
            return {"input_ids": rows(self.tokens)}
        arguments = {"inputs_embeds": rows(self.embeddings)}
        if self.positions is not None:
            arguments["position_ids"] = rows(self.positions.T).permute(2, 0, 1)
        return arguments


def state_forest_hidden(
    decoder: "PreTrainedModel", inputs: Inputs, starts: list[int], parents: list[int], *, whole: bool
) -> Tensor:
    """Return the final hidden states [N, H] of N tokens, whose segments begin at ``starts``.

    Rows of similar length are padded and run together; ``whole``: all rows at once, which must not share tokens.
    """
    tokens = inputs.tokens
    roots = _runs(starts, parents, len(tokens))
    results: list[tuple[list[int], Tensor]] = []
    if whole:
        _forward(decoder, inputs, roots, None, results)
    else:
        _run(decoder, inputs, roots, None, [], results)
    place = {token: at for at, token in enumerate(token for row, _ in results for token in row)}
    picked = torch.tensor([place[token] for token in range(len(tokens))], device=tokens.device)
    return torch.cat([states for _, states in results]).index_select(0, picked)


def _runs(starts: list[int], parents: list[int], size: int) -> list[_Run]:
    """Return the root runs. A shared segment of one token is computed by each of its children: when they process a
    single token, layers overwrite the state that the backward pass needs."""
    roots: list[_Run] = []
    left: list[
        tuple[_Run | None, list[int]]
    ] = []  # the run that a segment's children follow, and the tokens they must compute first
    inner = set(parents)
    for number, (start, end, parent) in enumerate(zip(starts, [*starts[1:], size], parents, strict=True)):
        after, tokens = (None, []) if parent < 0 else left[parent]
        tokens = [*tokens, *range(start, end)]
        if after is not None and len(tokens) == 1 and number in inner:
            left.append((after, tokens))
            continue
        run = _Run(tokens)
        (roots if after is None else after.children).append(run)
        left.append((run, []))
    return roots


def _run(
    decoder: "PreTrainedModel",
    inputs: Inputs,
    runs: list[_Run],
    cache: dict[str, "Cache"] | None,
    rows: list[int],
    results: list[tuple[list[int], Tensor]],
) -> None:
    """Run the segments that continue from ``rows`` of a cache (None: root segments), then their descendants."""
    for alike in _alike(runs):
        members = [runs[i] for i in alike]
        state = None if cache is None else fork(cache, [rows[i] for i in alike])
        if state is None and members[0].children:
            state = new_cache(decoder)
        _forward(decoder, inputs, members, state, results)
        children = [(child, row) for row, run in enumerate(members) for child in run.children]
        if children:
            _run(decoder, inputs, [child for child, _ in children], state, [row for _, row in children], results)


def _alike(runs: list[_Run]) -> list[list[int]]:
    """Return the indices of runs that are computed together: of equal length if their state is needed, because padding
    would change it, otherwise of similar length."""
    ends = [i for i, run in enumerate(runs) if not run.children]
    lengths: dict[int, list[int]] = {}
    for i, run in enumerate(runs):
        if run.children:
            lengths.setdefault(len(run.tokens), []).append(i)
    similar = bins_of([0] * len(ends), [len(runs[i].tokens) for i in ends])
    return [*lengths.values(), *([ends[i] for i in members] for members in similar)]


def _forward(
    decoder: "PreTrainedModel",
    inputs: Inputs,
    runs: list[_Run],
    state: dict[str, "Cache"] | None,
    results: list[tuple[list[int], Tensor]],
) -> None:
    rows = inputs.of(runs, least=1 if runs[0].children else 2)  # see ``_runs``
    # No mask is needed: padding is at the end, and no layer looks ahead.
    states = decoder(**rows, use_cache=state is not None, **(state or {})).last_hidden_state
    results += [(run.tokens, row[: len(run.tokens)]) for run, row in zip(runs, states, strict=True)]
