"""The cached paths against one plain forward, for every settings of attention."""

import pytest
import torch

from whet.engines.torch.decode_attention import DecodeCache
from whet.engines.torch.prefix import Prefill, Prefix
from whet.models.attention.dense import AttentionSettings


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, settings: AttentionSettings) -> torch.Tensor:
    """The oracle: q [heads, L, D], k and v [kv_heads, L, D], by loops over heads and queries."""
    heads, length, _ = q.shape
    out = torch.zeros(length, heads, v.shape[-1], dtype=q.dtype)
    for h in range(heads):
        kv = h * k.shape[0] // heads
        for i in range(length):
            first = 0 if settings.window is None else max(0, i - settings.window + 1)
            scores = (k[kv, first : i + 1] @ q[h, i]) * settings.scale
            if settings.softcap is not None:
                scores = torch.tanh(scores / settings.softcap) * settings.softcap
            if settings.sinks is not None:
                scores = torch.cat([scores, settings.sinks[h : h + 1]])
            out[i, h] = scores.softmax(0)[: i + 1 - first] @ v[kv, first : i + 1]
    return out


SETTINGS = {
    "plain": AttentionSettings(0.3),
    "window": AttentionSettings(0.3, window=5),
    "wide window": AttentionSettings(0.3, window=80),
    "softcap": AttentionSettings(0.5, softcap=2.0),
    "softcap and window": AttentionSettings(0.5, window=7, softcap=2.0),
    "sinks": AttentionSettings(0.3, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, 3.0], dtype=torch.float64)),
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_prefill_and_decode_equal_one_plain_causal_attention(settings: AttentionSettings) -> None:
    torch.manual_seed(0)
    heads, kv_heads, steps = 6, 2, 70
    prompts = [3, 70, 140]
    rows = [0, 1, 1, 1, 1, 1, 2]  # prompt of each row; one prompt needs more than one tile
    total = [prompts[p] + steps for p in rows]
    full = [tuple(torch.randn(n, t, 16, dtype=torch.float64) for n in (heads, kv_heads, kv_heads)) for t in total]
    for i, p in enumerate(rows):  # rows of a prompt share its keys
        for mine, first in zip(full[i], full[rows.index(p)], strict=True):
            mine[:, : prompts[p]] = first[:, : prompts[p]]
    expected = [plain(*qkv, settings) for qkv in full]

    packed = [torch.cat([full[rows.index(p)][j][:, :n] for p, n in enumerate(prompts)], 1)[None] for j in range(3)]
    state = Prefill(prompts, [Prefix(0)] * len(prompts))
    out = state.attend(0, *packed, settings)[0]
    start = 0
    for p, n in enumerate(prompts):
        torch.testing.assert_close(out[start : start + n], expected[rows.index(p)][:n], atol=1e-6, rtol=1e-5)
        start += n

    cache = DecodeCache(7, torch.device("cpu"))
    cache.join(state.prefixes[p] for p in rows)
    at = list(range(7))  # which sequence each row carries
    for step in range(steps):
        if step == 40:  # a row leaves, the last takes its number
            cache.leave(2)
            at[2] = at.pop()
        padded, positions = cache.begin()
        assert padded == 16
        assert positions[: len(at)] == [prompts[rows[i]] + step for i in at]
        new = [torch.zeros(1, n, padded, 16, dtype=torch.float64) for n in (heads, kv_heads, kv_heads)]
        for row, i in enumerate(at):
            for target, source in zip(new, full[i], strict=True):
                target[0, :, row] = source[:, prompts[rows[i]] + step]
        out = cache.attend(0, *new, settings)[0]
        for row, i in enumerate(at):
            torch.testing.assert_close(out[row], expected[i][prompts[rows[i]] + step], atol=1e-6, rtol=1e-5)
        cache.commit()


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_a_token_after_a_cached_prefix_gets_the_same_bits_as_in_the_whole_prompt_alone(
    settings: AttentionSettings,
) -> None:
    torch.manual_seed(0)
    length = 150
    q, k, v = (torch.randn(1, n, length, 16) for n in (6, 2, 2))
    alone = Prefill([length], [Prefix(0)])
    expected = alone.attend(0, q, k, v, settings)[0]
    for cached in (1, 31, 32, 33, 63, 100, length - 1):
        before = alone.prefixes[0].first(cached)
        packed = [torch.cat([x, x[:, :, cached:]], dim=2) for x in (q, k, v)]  # with the whole prompt in the same pass
        whole, rest = (
            Prefill([length] * 2, [Prefix(0), before]).attend(0, *packed, settings)[0].split([length, length - cached])
        )
        assert torch.equal(whole, expected)
        assert torch.equal(rest, expected[cached:])
