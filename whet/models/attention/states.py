"""A forest of segments through models whose layers carry a state along the row: recurrent, convolutional and linear
attention layers, and attention that can't be swapped. A segment is run once, and its children go on from copies of what
it left in transformers' own cache. Gradients flow through the copies. Knows no layout of ranks.
"""

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whet.models.attention.bins import bins_of

if TYPE_CHECKING:
    from transformers import Cache, PretrainedConfig

# Names of text models that go on from a cache, with one token or many, as they would without one.
_FORKED = {
    "axk2", "biogpt", "bloom", "codegen", "deepseek_v32", "doge", "falcon", "falcon_h1", "glm_moe_dsa", "gpt_neo",
    "gpt_neox_japanese", "gptj", "granitemoehybrid", "hy_v4", "inkling_text", "lfm2", "lfm2_moe", "llama4_text",
    "mamba2", "mpt", "nemotron", "nemotron_h", "olmo_hybrid", "phimoe", "qwen3_5_moe_text", "qwen3_5_text",
    "qwen3_next", "stablelm", "xglm", "zamba2", "zaya",
}  # fmt: skip
# These go on with one token at a time: given more, Mamba's first scan begins without its state. The others share
# prompts by forest attention.
_STEPPED = {"falcon_mamba", "jamba", "mamba", "diffllama", "gemma3n_text", "hrm_text"}


def forks(config: "PretrainedConfig") -> bool:
    """Return whether prompts can be shared by copies of the state at their end."""
    return config.get_text_config().model_type in _FORKED


def steps(config: "PretrainedConfig") -> bool:
    """Return whether the model's own cache is good for sampling."""
    return forks(config) or config.get_text_config().model_type in _STEPPED


def new_cache(model: nn.Module) -> dict[str, "Cache"]:
    """Return an empty cache under the name by which ``model`` takes it."""
    from transformers import DynamicCache

    name = "cache_params" if "cache_params" in inspect.signature(model.forward).parameters else "past_key_values"
    return {name: DynamicCache(config=model.config)}


def tensors_of(cache: "Cache") -> Iterator[Tensor]:
    """Yield what a cache holds."""
    for layer in cache.layers:
        for value in vars(layer).values():
            yield from (x for x in (value.values() if isinstance(value, dict) else [value]) if isinstance(x, Tensor))


def fork(cache: dict[str, "Cache"], rows: list[int]) -> dict[str, "Cache"]:
    """Return copies of a cache's ``rows``, which the model may write into: the cache stays as it is."""
    ((name, old),) = cache.items()
    new: Any = copy.copy(old)
    new.layers = [copy.copy(layer) for layer in old.layers]
    for layer in new.layers:
        vars(layer).update({name: dict(value) for name, value in vars(layer).items() if isinstance(value, dict)})
    device = next((layer.device for layer in new.layers if getattr(layer, "device", None) is not None), None)
    new.reorder_cache(torch.tensor(rows, device=device))
    for layer in new.layers:
        if hasattr(layer, "is_recurrent_states_initialized"):  # it puts a new one there; else it writes into what
            layer.is_recurrent_states_initialized = dict.fromkeys(layer.recurrent_states, False)  # backward reads
    return {name: new}


@dataclass(slots=True)
class _Run:
    """Tokens that one row of a forward computes, and those that go on from there."""

    tokens: list[int]
    children: list["_Run"] = field(default_factory=list)


def state_forest_hidden(decoder: Any, tokens: Tensor, starts: list[int], parents: list[int], *, whole: bool) -> Tensor:
    """Return the final hidden states of ``tokens`` [N], [N, H], which form segments that begin at ``starts``.

    Rows of similar length are padded and run together; ``whole``: all rows at once, which must share nothing.
    """
    roots = _runs(starts, parents, len(tokens))
    found: list[tuple[list[int], Tensor]] = []
    if whole:
        _forward(decoder, tokens, roots, None, found)
    else:
        _run(decoder, tokens, roots, None, [], found)
    place = {token: at for at, token in enumerate(token for row, _ in found for token in row)}
    picked = torch.tensor([place[token] for token in range(len(tokens))], device=tokens.device)
    return torch.cat([states for _, states in found]).index_select(0, picked)


def _runs(starts: list[int], parents: list[int], size: int) -> list[_Run]:
    """Return the roots. A shared segment of one token is computed by each of its children: on their way with one token,
    layers overwrite the state that the backward pass wants."""
    roots: list[_Run] = []
    left: list[tuple[_Run | None, list[int]]] = []  # whom a segment's children follow, and what they must compute first
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
    decoder: Any,
    tokens: Tensor,
    runs: list[_Run],
    cache: dict[str, "Cache"] | None,
    rows: list[int],
    found: list[tuple[list[int], Tensor]],
) -> None:
    """Run what goes on from ``rows`` of a cache (None: what begins), then what goes on from there."""
    for alike in _alike(runs):
        several = [runs[i] for i in alike]
        state = None if cache is None else fork(cache, [rows[i] for i in alike])
        if state is None and several[0].children:
            state = new_cache(decoder)
        _forward(decoder, tokens, several, state, found)
        children = [(child, row) for row, run in enumerate(several) for child in run.children]
        if children:
            _run(decoder, tokens, [child for child, _ in children], state, [row for _, row in children], found)


def _alike(runs: list[_Run]) -> list[list[int]]:
    """Return the numbers of those that are run together: of one length where the state at the end matters, for padding
    would change it, and of similar length where it does not."""
    ends = [i for i, run in enumerate(runs) if not run.children]
    lengths: dict[int, list[int]] = {}
    for i, run in enumerate(runs):
        if run.children:
            lengths.setdefault(len(run.tokens), []).append(i)
    similar = bins_of([0] * len(ends), [len(runs[i].tokens) for i in ends])
    return [*lengths.values(), *([ends[i] for i in members] for members in similar)]


def _forward(
    decoder: Any,
    tokens: Tensor,
    runs: list[_Run],
    state: dict[str, "Cache"] | None,
    found: list[tuple[list[int], Tensor]],
) -> None:
    ids = nn.utils.rnn.pad_sequence([tokens[run.tokens] for run in runs], batch_first=True)
    if ids.shape[1] == 1 and not runs[0].children:
        ids = F.pad(ids, (0, 1))  # see _runs
    # No mask: padding comes last, and nothing looks ahead.
    states = decoder(input_ids=ids, use_cache=state is not None, **(state or {})).last_hidden_state
    found += [(run.tokens, row[: len(run.tokens)]) for run, row in zip(runs, states, strict=True)]
