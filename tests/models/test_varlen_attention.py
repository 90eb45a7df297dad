"""Forest attention by rows of different lengths: cascade and gathered rows, in float64, against all pairs under a dense
mask and against separate runs of a model. The kernel of GPUs is in ``tests/cuda``; here it is plain products."""

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.test_forest_attention import DEEP, LENGTHS, build, forest, separately, states_and_gradients
from whet.models.attention.dense import AttentionSettings
from whet.models.attention.forest import forest_hidden, use_forest_attention
from whet.models.attention.row import Rows, attend
from whet.models.attention.varlen import VarlenLayout
from whet.models.shards import Tokens

CPU = torch.device("cpu")


def random_forest(order: random.Random) -> tuple[list[int], list[int]]:
    """Segments' parents, which stand anywhere before them, and lengths."""
    count = order.randint(1, 12)
    return [order.randint(-1, i - 1) for i in range(count)], [
        order.choice([1, order.randint(1, 9)]) for _ in range(count)
    ]


def layout_of(parents: list[int], lengths: list[int], tokens: Tokens | None = None) -> VarlenLayout:
    return VarlenLayout.of(
        [sum(lengths[:i]) for i in range(len(lengths))], parents, sum(lengths), CPU, tokens or Tokens()
    )


def pairs(parents: list[int], lengths: list[int], window: int | None) -> Tensor:
    """Return a mask of the keys that each query sees, [N, N], from each token's path."""
    seen = torch.zeros(sum(lengths), sum(lengths), dtype=torch.bool)
    for path, length in zip(forest(parents, lengths)[1], lengths, strict=True):
        for at in range(len(path) - length, len(path)):
            seen[path[at], path[max(0, at + 1 - window) if window else 0 : at + 1]] = True
    return seen


def inputs(size: int, heads: int, kv_heads: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    g = torch.Generator().manual_seed(size)
    shapes = [(1, count, size, 8) for count in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=g, dtype=dtype).requires_grad_() for shape in shapes]


def with_gradients(out: Tensor, given: list[Tensor]) -> list[Tensor]:
    pull = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * pull).sum(), given)]


@pytest.mark.parametrize("window", [None, 1, 2, 5, 1000])
@pytest.mark.parametrize("seed", range(25))
def test_results_and_gradients_are_those_of_all_pairs_under_a_mask(seed: int, window: int | None) -> None:
    order = random.Random(seed)
    parents, lengths = random_forest(order)
    heads, kv_heads = order.choice([(4, 4), (4, 2), (6, 2), (3, 1)])
    q, k, v = given = inputs(sum(lengths), heads, kv_heads)
    repeated = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    expected = F.scaled_dot_product_attention(q, *repeated, pairs(parents, lengths, window), scale=0.3).transpose(1, 2)
    found = layout_of(parents, lengths).attend(q, k, v, AttentionSettings(0.3, window))
    torch.testing.assert_close(with_gradients(found, given), with_gradients(expected, given), atol=1e-12, rtol=1e-9)


def test_shared_prompts_are_one_row_each_and_no_key_is_copied() -> None:
    """Two prompts, one of them with a second level: 3 calls, and as many keys as tokens that have descendants."""
    layout = layout_of([-1, 0, 0, 2, 2, -1, 5, 5, 5], [10, 4, 6, 3, 3, 20, 1, 1, 1])
    layout.attend(*inputs(49, 2, 2), AttentionSettings(1.0))
    own, first, second = layout.calls[None]
    assert own.query is None
    assert own.key is None
    assert own.rows.causal
    assert [r.query_ends.diff().tolist() for r in (first.rows, second.rows)] == [[16, 3], [6]]
    assert [r.key_ends.diff().tolist() for r in (first.rows, second.rows)] == [[10, 20], [6]]
    assert not first.rows.causal


def test_with_a_window_no_more_ancestors_keys_are_gathered_than_are_seen() -> None:
    layout = layout_of([-1, 0, 1, 0], [50, 2, 7, 3])
    layout.attend(*inputs(62, 2, 2), AttentionSettings(1.0, window=6))
    (call,) = layout.calls[6]
    assert call.rows.key_ends.diff().tolist() == [50, 5 + 2, 5 + 7, 5 + 3]
    assert call.key is not None
    assert call.key[50 : 50 + 7 + 5].tolist() == [*range(45, 52), 47, 48, 49, 50, 51]


class Half(Tokens):
    """One of two ranks, which has the tokens of the first and the last quarter, or those between."""

    spread = True

    def __init__(self, rank: int, whole: list[Tensor]) -> None:
        self.rank, self.whole = rank, whole

    def runs(self, tokens: int) -> list[range]:
        cut = tokens // 4
        return [range(cut), range(tokens - cut, tokens)] if self.rank == 0 else [range(cut, tokens - cut)]

    def gather(self, rows: Tensor) -> Tensor:
        return torch.cat([x[0].transpose(0, 1) for x in self.whole], 1)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("seed", range(8))
def test_a_rank_with_a_part_of_the_tokens_computes_theirs(seed: int, window: int | None) -> None:
    parents, lengths = random_forest(random.Random(seed))
    size = sum(lengths)
    given = inputs(size, 4, 2)
    settings = AttentionSettings(0.3, window)
    expected = layout_of(parents, lengths).attend(*given, settings)
    found = torch.zeros_like(expected)
    for rank in (0, 1):
        tokens = Half(rank, given[1:])
        here = torch.cat([torch.arange(run.start, run.stop) for run in tokens.runs(size)])
        if len(here):
            mine = [x[:, :, here] for x in given]
            found = found.index_copy(1, here, layout_of(parents, lengths, tokens).attend(*mine, settings))
    torch.testing.assert_close(with_gradients(found, given), with_gradients(expected, given), atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("window", [None, 5])
def test_in_bfloat16_results_and_gradients_are_off_by_no_more_than_its_rounding(window: int | None) -> None:
    layout = layout_of([-1, *[0] * 100], [4, *[2] * 100])
    rounded = [x.detach().bfloat16().requires_grad_() for x in inputs(204, 2, 1)]
    exact = [x.detach().double().requires_grad_() for x in rounded]
    ours, theirs = (
        with_gradients(layout.attend(*given, AttentionSettings(0.3, window)), given) for given in (rounded, exact)
    )
    for found, right in zip(ours, theirs, strict=True):
        assert found.dtype == torch.bfloat16
        assert float((found.double() - right).norm() / right.norm()) < 0.01


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_a_models_states_and_gradients_are_those_of_separate_runs(kind: str) -> None:
    model = build(kind)
    batch, paths = forest(DEEP, LENGTHS)
    expected = states_and_gradients(model, separately(model, batch, paths))
    use_forest_attention(model)
    found = states_and_gradients(model, forest_hidden(model, batch, attention="varlen"))
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


class Padded(Tokens):
    multiple = 8


def test_padding_changes_nothing() -> None:
    model = build("gemma3")
    use_forest_attention(model)
    batch, _ = forest(DEEP, LENGTHS)
    plain, padded = (forest_hidden(model, batch, tokens, attention="varlen") for tokens in (None, Padded()))
    assert len(batch) % 8
    torch.testing.assert_close(padded, plain, atol=1e-12, rtol=1e-12)


def test_the_kernel_is_asked_for_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: what goes to torch's operation, whose arguments a CPU can't check by running it."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    class OnGpu(Tensor):
        device = torch.device("cuda", 0)

    def kernel(*args: Any, **named: Any) -> tuple[Tensor, ...]:
        calls.append((args, named))
        return args[0], args[0], args[0], args[0], args[0]

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", kernel)
    q = torch.zeros(3, 2, 8).as_subclass(OnGpu)
    ends = torch.tensor([0, 3], dtype=torch.int32)
    attend(q, q, q, Rows(ends, ends, 3, 3, causal=True), 0.5)
    attend(q, q, q, Rows(ends, ends, 3, 3, causal=True, window=2), 0.5)
    for args, _ in calls:
        assert args[3:] == (ends, ends, 3, 3, 0.0, True, False)
    assert [named for _, named in calls] == [
        {"scale": 0.5},
        {"scale": 0.5, "window_size_left": 1, "window_size_right": 0},
    ]
