"""The distribution that is sampled from, against plain formulas, and the draws against chi-square."""

import math

import numpy as np
import pytest
import torch

from whet.core.types import Distribution
from whet.engines.sampling import sample_tokens, thresholds, uniform_stream
from whet.models.distribution import least_logit

DISTRIBUTIONS = [
    Distribution(),
    Distribution(temperature=0.7),
    Distribution(temperature=1.8),
    Distribution(top_k=5),
    Distribution(top_p=0.6),
    Distribution(min_p=0.2),
    Distribution(temperature=1.3, top_k=12, top_p=0.8, min_p=0.05),
]


def plain_logprobs(row: torch.Tensor, d: Distribution) -> list[float]:
    """The oracle: one row, python lists, float64."""
    x = [float(v) / d.temperature for v in row]
    kept = {i for i in range(len(x)) if not d.min_p or math.exp(x[i] - max(x)) >= d.min_p}
    if d.top_k:
        kth = sorted(x, reverse=True)[min(d.top_k, len(x)) - 1]
        kept = {i for i in kept if x[i] >= kth}
    if d.top_p < 1:
        total = sum(math.exp(x[i]) for i in kept)
        mass, last = 0.0, 0.0
        for i in sorted(kept, key=lambda i: -x[i]):
            last = x[i]
            mass += math.exp(x[i]) / total
            if mass >= d.top_p:
                break
        kept = {i for i in kept if x[i] >= last}
    total = math.log(sum(math.exp(x[i]) for i in kept))
    return [x[i] - total if i in kept else -math.inf for i in range(len(x))]


def padded(logits: torch.Tensor, rows: int = 16) -> torch.Tensor:
    return torch.cat([logits, torch.zeros(-len(logits) % rows, logits.shape[1], dtype=logits.dtype)])


@pytest.mark.parametrize("d", DISTRIBUTIONS, ids=str)
@pytest.mark.parametrize("vocab", [7, 256, 700])
def test_logprobs_are_those_of_the_distribution_that_is_sampled(d: Distribution, vocab: int) -> None:
    torch.manual_seed(1)
    logits = torch.randn(8, vocab) * 2
    tokens, logprobs = sample_tokens(padded(logits), uniform_stream(3, 8).tolist(), [d] * 8, [False] * 8)
    for row, token, logprob in zip(logits, tokens, logprobs, strict=True):
        assert logprob == pytest.approx(plain_logprobs(row, d)[token], abs=2e-6)


@pytest.mark.parametrize("d", DISTRIBUTIONS, ids=str)
def test_draws_follow_the_distribution(d: Distribution) -> None:
    torch.manual_seed(2)
    vocab, draws = 20, 16000
    row = torch.randn(vocab) * 1.5
    tokens, _ = sample_tokens(row.expand(draws, -1), uniform_stream(7, draws).tolist(), [d] * draws, [False] * draws)
    counts = np.bincount(tokens, minlength=vocab)
    expected = np.exp(plain_logprobs(row, d)) * draws
    assert counts[expected == 0].sum() == 0
    seen = expected > 5
    chi_square = float(((counts - expected)[seen] ** 2 / expected[seen]).sum())
    freedom = max(int(seen.sum()) - 1, 1)
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 4


def test_draws_follow_the_distribution_over_a_vocabulary_of_many_chunks() -> None:
    vocab, draws = 1000, 16000
    row = torch.linspace(0, 3, vocab)
    tokens, _ = sample_tokens(
        row.expand(draws, -1), uniform_stream(9, draws).tolist(), [Distribution()] * draws, [False] * draws
    )
    expected = row.softmax(0).view(20, 50).sum(1).numpy() * draws
    counts = np.bincount(np.array(tokens) // 50, minlength=20)
    assert float(((counts - expected) ** 2 / expected).sum()) < 19 + 4 * math.sqrt(38)


def test_a_token_without_mass_is_never_drawn_even_at_the_ends_of_the_unit_interval() -> None:
    logits = torch.full((16, 600), float("-inf"))
    logits[:, 300], logits[:, 310] = 1.0, 0.0
    for uniform in (0.0, 0.5, 1 - 2**-53):
        tokens, logprobs = sample_tokens(logits, [uniform] * 16, [Distribution()] * 16, [False] * 16)
        assert set(tokens) <= {300, 310}
        assert all(math.isfinite(x) for x in logprobs)


def test_greedy_takes_the_likeliest_and_reports_temperature_one() -> None:
    torch.manual_seed(0)
    logits = torch.randn(16, 300)
    tokens, logprobs = sample_tokens(logits, [0.9] * 16, [Distribution(temperature=5.0, top_k=1)] * 16, [True] * 16)
    assert tokens == logits.argmax(-1).tolist()
    torch.testing.assert_close(torch.tensor(logprobs), logits.log_softmax(-1).max(-1).values)


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    torch.manual_seed(0)
    logits = torch.randn(48, 777).bfloat16()
    many = [DISTRIBUTIONS[i % len(DISTRIBUTIONS)] for i in range(48)]
    uniforms = uniform_stream(1, 48).tolist()
    together = sample_tokens(logits, uniforms, many, [False] * 48)
    for i in range(48):
        alone = sample_tokens(padded(logits[i : i + 1]), uniforms[i : i + 1], many[i : i + 1], [False])
        assert (alone[0][0], alone[1][0]) == (together[0][i], together[1][i])


@pytest.mark.parametrize("d", DISTRIBUTIONS, ids=str)
@pytest.mark.parametrize("spread", [0.001, 1.0, 5.0])
def test_what_is_kept_is_what_the_learner_keeps(d: Distribution, spread: float) -> None:
    torch.manual_seed(3)
    x = torch.randn(6, 3000) * spread
    assert torch.equal(thresholds(x, d), least_logit(x, d))


@pytest.mark.parametrize("top_k", [0, 1, 5, 400])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3])
@pytest.mark.parametrize("min_p", [0.0, 0.02, 0.5])
def test_every_combination_of_filters_keeps_the_same_tokens_in_sampler_learner_and_formula(
    top_k: int, top_p: float, min_p: float
) -> None:
    """min-p, then top-k, then top-p over what they left, with ties and more candidates than are looked at first."""
    torch.manual_seed(4)
    d = Distribution(top_k=top_k, top_p=top_p, min_p=min_p)
    x = torch.cat([torch.randn(3, 900), torch.randn(3, 900).mul(4).round(), torch.zeros(1, 900)])
    kept = x >= thresholds(x, d)
    assert torch.equal(kept, x >= least_logit(x, d))
    for row, mine in zip(x, kept, strict=True):
        assert mine.tolist() == [p > -math.inf for p in plain_logprobs(row, d)]


def test_the_stream_of_a_seed_is_fixed_and_its_start_does_not_depend_on_its_length() -> None:
    assert uniform_stream(5, 3).tolist() == uniform_stream(5, 10)[:3].tolist()
    assert uniform_stream(5, 3).tolist() != uniform_stream(6, 3).tolist()
    assert uniform_stream(0, 2).tolist() == [0.011546754286331562, 0.24154919656271812]
