"""The prefix cache: the longest prefix, the least recently used prompt dropped first, and results that equal a
computation from scratch, to the bit."""

import asyncio
import random
import weakref
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from tests.engines.test_torch_generator import MODELS, make
from tests.engines.test_torch_generator import run as run_one
from tests.grids import grid
from tests.tiny import tiny_llama
from whet.engines.base import Completion, SamplingParams
from whet.engines.torch.decode_attention import DecodeCache
from whet.engines.torch.generator import TorchGenerator
from whet.engines.torch.pages import PAGE
from whet.engines.torch.prefix import Prefix
from whet.engines.torch.prefix_cache import CachedPrefix, PrefixCache, common_prefix

NOTHING = torch.zeros(0)


def entry(length: int) -> CachedPrefix:
    return CachedPrefix(Prefix(length), NOTHING)


def test_the_longest_beginning_is_found_among_any_prompts() -> None:
    draw = random.Random(3)
    cache = PrefixCache(10_000)
    cached: list[tuple[int, ...]] = []
    for _ in range(300):
        prompt = tuple(draw.randrange(2) for _ in range(draw.randint(1, 12)))
        longest = max((common_prefix(prompt, other) for other in cached), default=0)
        assert cache.longest(prompt).length == min(longest, len(prompt) - 1)
        if prompt not in cached:
            cached.append(prompt)
            cache.add(prompt, entry(len(prompt)))


def test_what_was_not_used_for_longest_goes_first_and_what_was_extended_before_it() -> None:
    cache = PrefixCache(10)
    for prompt in ((1, 1, 1), (2, 2, 2), (3, 3, 3)):
        cache.add(prompt, entry(3))
    cache.trim()
    assert cache.get((1, 1, 1))
    cache.add((3, 3, 3, 3), entry(4))
    cache.trim()
    assert not cache.get((3, 3, 3))
    cache.add((4, 4), entry(2))
    cache.trim()
    assert not cache.get((2, 2, 2))
    assert [cache.longest((*p, 9)).length for p in ((1, 1, 1), (2, 2, 2), (3, 3, 3), (4, 4))] == [3, 0, 3, 2]


@pytest.mark.parametrize(("bytes_of_token", "kept"), [(2**10, 64), (2**15, 16), (2**20, 4)])
def test_without_a_setting_a_gibibyte_is_kept_and_at_least_some_prompts(bytes_of_token: int, kept: int) -> None:
    cache = PrefixCache(None)
    layer = (torch.zeros(1, dtype=torch.uint8).expand(1, 2048, bytes_of_token // 2),)
    for first in range(64):
        cache.add((first, *range(2047)), CachedPrefix(Prefix(2048, [layer], [layer]), NOTHING))
    cache.trim()
    assert [bool(cache.get((first, *range(2047)))) for first in range(64)] == [False] * (64 - kept) + [True] * kept


async def conversation(generator: TorchGenerator, number: int, lengths: list[int]) -> list[Completion]:
    """Several turns: each prompt is the last one, its answer and an observation."""
    draw = random.Random(number)
    prompt, completions = list(range(90)), []
    for turn, length in enumerate(lengths):
        params = SamplingParams(draw.randint(1, 30), seed=100 * number + turn)
        completions.append(await generator.sample(prompt, params, f"session {number}"))
        prompt = prompt + completions[-1].tokens + [draw.randrange(200) for _ in range(length)]
    return completions


@pytest.mark.parametrize(("model", "dtype"), grid(MODELS, ["float32", "bfloat16", "float64"]))
def test_turns_with_known_beginnings_equal_those_computed_anew_to_the_bit(
    model: Callable[..., PreTrainedModel], dtype: str
) -> None:
    sharing, alone = make(model, dtype, max_batch=8), make(model, dtype, max_batch=3, prefix_tokens=0)
    observations = [[1, 40, 3, 70], [64, 64, 16, 1], [7, 5, 90, 11], [30, 2, 1, 100]]

    async def body() -> None:
        mine = await asyncio.gather(*(conversation(sharing, i, turns) for i, turns in enumerate(observations)))
        other = [await conversation(alone, i, turns) for i, turns in enumerate(observations)]
        await alone.close()
        for one, two in zip(mine, other, strict=True):
            assert [(c.tokens, c.logprobs) for c in one] == [(c.tokens, c.logprobs) for c in two]
        assert all(c.cached >= 89 for turns in mine for c in turns[1:])
        assert all(c.cached == 0 for turns in other for c in turns)
        assert sharing.counters.prompt_tokens == alone.counters.prompt_tokens == alone.counters.prefill_tokens
        assert sharing.counters.prefill_tokens < 0.4 * alone.counters.prefill_tokens

    run_one(sharing, body)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_prompt_leaves_does_not_depend_on_where_it_was_cut(dtype: str) -> None:
    engine = make(tiny_llama, dtype).engine
    prompt = [(7 * i) % 200 for i in range(700)]
    [(whole, logits)] = engine.prefill([prompt])
    for cut in (1, 63, 64, 65, 255, 256, 257, 511, 600, 699):
        other = engine.prefill([prompt[:cut] + [5] * 40])[0][0]
        [(prefix, again), _] = engine.prefill([prompt, [1, 2, 3]], [other.first(cut), Prefix(0)])
        assert torch.equal(again, logits)
        both = zip(prefix.keys + prefix.values, whole.keys + whole.values, strict=True)
        assert all(torch.equal(torch.cat(one, 1), torch.cat(other, 1)) for one, other in both)


def cached(prefixes: list[Prefix]) -> int:
    """The bytes of memory behind them, each counted once."""
    pieces = [piece for prefix in prefixes for layer in prefix.keys + prefix.values for piece in layer]
    return sum({(memory := piece.untyped_storage()).data_ptr(): memory.nbytes() for piece in pieces}.values())


def test_prompts_that_begin_alike_hold_that_once() -> None:
    engine = make().engine
    preamble = [i % 200 for i in range(150)]
    first = engine.prefill([[*preamble, 3, 4]])[0][0]
    others = [[*preamble, 5, i] for i in range(20)]
    prefixes = [prefix for prefix, _ in engine.prefill(others, [first.first(150)] * len(others))]
    assert cached([first, *prefixes]) == cached([first]) * (152 + 2 * len(others)) // 152
    short = first.first(40)
    assert cached([short]) == cached([first]) * 40 // 152, "most of what it is cut from can go"
    assert torch.equal(torch.cat(short.keys[0], 1), torch.cat(first.keys[0], 1)[:, :40])


def test_rows_of_prompts_that_begin_alike_share_the_pages_of_the_beginning() -> None:
    engine = make().engine
    preamble = [i % 200 for i in range(2 * PAGE + 10)]
    first = engine.prefill([[*preamble, 3, 4]])[0][0]
    others = [[*preamble, 5, i] for i in range(19)]
    prefixes = [first, *(prefix for prefix, _ in engine.prefill(others, [first.first(len(preamble))] * len(others)))]

    alone = []
    for prefix in prefixes:
        cache, feed = engine.open_rows(1)
        cache.join([prefix])
        alone.append(feed([[7]])[0])
    cache, feed = engine.open_rows(len(prefixes))
    assert isinstance(cache, DecodeCache)
    cache.join(prefixes)
    tiles = [tile for kind in cache.pages.kinds.values() for tile in kind.tiles]
    assert sorted(tile.page for tile in tiles) == [0, 0, 1, 1] + [2] * 20, "a tile has up to 16 rows"
    assert torch.equal(feed([[7]] * 20)[:20], torch.stack(alone))
    cache.commit()
    for row in (3, 0, 5):  # the last row takes the number of one that leaves
        cache.leave(row)
        alone[row] = alone[-1]
        prefixes[row] = prefixes[-1]
        alone.pop()
        prefixes.pop()
    for row, tiles_of_row in enumerate(cache.pages.rows):
        assert [tile.page for tile in tiles_of_row] == [0, 1, 2]
        assert all(
            row in tile.rows and cache.pages.kinds[tile.places].tiles[tile.number] is tile for tile in tiles_of_row
        )
    again, feed_again = engine.open_rows(17)
    assert isinstance(again, DecodeCache)
    again.join(prefixes)
    feed_again([[7]] * 17)
    again.commit()
    assert torch.equal(feed([[9]] * 17)[:17], feed_again([[9]] * 17)[:17])
    for _ in prefixes:
        cache.leave(0)
    assert cache.pages.kinds == {}
    tiles_of_16 = weakref.ref(again.pages.kinds[16])
    del again, feed_again
    assert tiles_of_16() is None, "memory is returned without Python's garbage collector, which runs seldom"


def test_a_generator_that_samples_nothing_holds_no_rows() -> None:
    generator = make()

    async def body() -> None:
        await generator.sample([1, 2, 3], SamplingParams(4, seed=1), "")
        cache = generator._decoder.cache
        assert isinstance(cache, DecodeCache)
        assert cache.keys == cache.values == []
        assert cache.pages.kinds == {}
        again = await asyncio.gather(*(generator.sample([1, 2, 3], SamplingParams(4, seed=1), "") for _ in "ab"))
        assert again[0].tokens == again[1].tokens

    run_one(generator, body)


def test_prompts_that_begin_alike_compute_that_once_also_when_they_come_together() -> None:
    generator = make()
    preamble = [i % 200 for i in range(150)]
    prompts = [[*preamble, 10 + i, *([i] * i)] for i in range(12)]

    async def body() -> None:
        out = await asyncio.gather(*(generator.sample(p, SamplingParams(3, seed=1), "") for p in prompts for _ in "ab"))
        own = sum(map(len, prompts)) - 150 * len(prompts)
        assert generator.counters.prefill_tokens == 150 + own
        assert sum(c.cached for c in out) == generator.counters.prompt_tokens - 150 - own

    run_one(generator, body)
