"""The cached paths against one plain forward, for every settings of attention."""

import pytest
import torch

from whet.engines.torch.decode_attention import DecodeCache
from whet.engines.torch.prefix import Prefill, Prefix
from whet.engines.torch.row_counts import Split, split_of
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


def prompt_of(length: int, group: int, dtype: torch.dtype) -> Prefix:
    prefill = Prefill([length], [Prefix(0)])
    prefill.attend(0, *(torch.randn(1, n, length, 32).to(dtype) for n in (2 * group, 2, 2)), AttentionSettings(0.3))
    return prefill.prefixes[0]


def decode(prompts: list[Prefix], counts: list[int], group: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what the first row attends to in its last step. Row i begins ``max(counts) - counts[i]`` steps late."""
    cache, steps = DecodeCache(len(prompts), torch.device("cpu")), max(counts)
    order = sorted(range(len(prompts)), key=lambda row: -counts[row])
    for step in range(steps):
        cache.join(prompts[row] for row in order if counts[row] == steps - step)
        rows = order[: cache.active]
        padded, _ = cache.begin()
        new = [torch.zeros(1, n, padded, 32, dtype=dtype) for n in (2 * group, 2, 2)]
        for place, row in enumerate(rows):
            seeded = torch.Generator().manual_seed(10_000 * row + step - (steps - counts[row]))
            for target in new:
                target[0, :, place] = torch.randn(target.shape[1], 32, generator=seeded).to(dtype)
        out = cache.attend(0, *new, AttentionSettings(0.3))[0]
        cache.commit()
    return out[rows.index(0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_gets_the_same_bits_next_to_a_longer_one(dtype: torch.dtype) -> None:
    """Kernels add up the products of many keys in parts, whose sizes depend on the number of keys."""
    torch.manual_seed(0)
    prompts = [prompt_of(100, 3, dtype), prompt_of(300, 3, dtype)]
    assert torch.equal(decode(prompts, [650, 1030], 3, dtype), decode(prompts[:1], [650], 3, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 16])
def test_a_row_gets_the_same_bits_however_many_share_its_prompt(group: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    prompt = prompt_of(150, group, dtype)
    alone = decode([prompt], [2], group, dtype)
    for others in (1, 4, 8, 15, 20):
        crowd = decode([prompt] * (1 + others), [2] + [3] * others, group, dtype)  # the first row comes last
        assert torch.equal(crowd, alone), f"with {others} others"


@pytest.mark.parametrize("split", [Split(1, 6), Split(1, 8), Split(2, 4), Split(3, 4)])
def test_rows_are_found_again_in_the_products_that_they_are_split_into(split: Split) -> None:
    rows = torch.arange(30).view(5, 6)
    arranged = split.arrange(rows)
    assert len(arranged) == 5 * split.products * split.rows
    assert torch.equal(arranged[split.places(5, 6, rows.device)], rows)
    tiles = arranged.view(split.products, 5, split.rows) // 6
    assert torch.equal(tiles, torch.arange(5)[:, None].expand_as(tiles)), "a product's rows belong to its tile"


@pytest.mark.parametrize("group", [1, 3])
def test_products_that_are_split_have_the_same_results(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    prompts = [prompt_of(150, group, torch.float64)] * 9
    whole = decode(prompts, [3] * 9, group, torch.float64)
    for split in (Split(1, 60), Split(4, 16)):
        monkeypatch.setattr("whet.engines.torch.decode_attention.split_of", lambda *_, split=split, **__: split)
        torch.testing.assert_close(decode(prompts, [3] * 9, group, torch.float64), whole, atol=1e-12, rtol=0)


def test_products_on_a_gpu_are_not_tried_on_the_cpu() -> None:
    assert split_of(7, 128, torch.empty(1, 64, device="meta"), 64) == Split(1, 7)
