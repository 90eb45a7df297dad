"""The head in tiles against the whole softmax in float64, its gradients, its memory, and finding it in real models."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
)

from tests.forks import finished, program_fork
from tests.tiny import tiny_gemma, tiny_llama, tiny_qwen3
from whet.base.errors import WhetError
from whet.core.types import Distribution
from whet.models import tiled_logprobs
from whet.models.head import Head, check_head, head_of

T, H, V = 13, 8, 50
DISTRIBUTIONS = [
    Distribution(),
    Distribution(temperature=0.7),
    Distribution(top_k=5),
    Distribution(top_p=0.6),
    Distribution(min_p=0.1),
    Distribution(temperature=1.3, top_k=20, top_p=0.8, min_p=0.02),
]
EXTRAS = [{}, {"scale": 0.5, "softcap": 3.0}]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled_logprobs, "tiles_on", lambda device: tiled_logprobs.Tiles(1024, 16, 128))


def parts(seed: int = 0, spread: float = 1.5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    hidden = (torch.randn(T, H, generator=g, dtype=torch.float64) * spread).requires_grad_()
    weight = torch.randn(V, H, generator=g, dtype=torch.float64).requires_grad_()
    bias = torch.randn(V, generator=g, dtype=torch.float64).requires_grad_()
    return hidden, weight, bias, torch.randint(0, V, (T,), generator=g)


def plain(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Tensor,
    distribution: Distribution,
    scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Row by row, with the support found by sorting."""
    logprobs, entropies = [], []
    for h, target in zip(hidden, targets, strict=True):
        logits = (weight @ h + bias) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits / distribution.temperature
        order = logits.argsort(descending=True).tolist()
        p = logits.detach().softmax(-1)
        kept = [i for i in order if p[i] >= distribution.min_p * p.max() * (1 - 1e-12)]
        kept = kept[: distribution.top_k or None]
        mass, nucleus = 0.0, []
        for i in kept:
            if mass >= distribution.top_p:
                break
            nucleus.append(i)
            mass += float(p[i] / p[kept].sum())
        inside = torch.tensor(sorted({*nucleus, int(target)}))
        log_p = logits[inside].log_softmax(-1)
        logprobs.append(log_p[inside == target].sum())
        entropies.append(-(log_p.exp() * log_p).sum())
    return torch.stack(logprobs), torch.stack(entropies)


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_tiles_give_the_whole_softmax_and_its_gradients(distribution: Distribution, extra: dict) -> None:
    hidden, weight, bias, targets = parts()
    pull = torch.randn(2, T, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    logprobs, entropy = Head(weight, bias, **extra).token_logprobs(
        hidden, targets, distribution, with_entropy=True, chunk=5
    )
    assert entropy is not None
    got = torch.autograd.grad((pull[0] * logprobs + pull[1] * entropy).sum(), (hidden, weight, bias))
    expected = plain(hidden, weight, bias, targets, distribution, **extra)
    wanted = torch.autograd.grad((pull[0] * expected[0] + pull[1] * expected[1]).sum(), (hidden, weight, bias))
    torch.testing.assert_close((logprobs, entropy), expected, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(got, wanted, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("distribution", [Distribution(), DISTRIBUTIONS[-1]])
def test_numerical_gradients_agree(distribution: Distribution) -> None:
    hidden, weight, bias, targets = parts()

    def both(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor | None]:
        return Head(weight, bias, scale=1.5, softcap=4.0).token_logprobs(
            hidden, targets, distribution, with_entropy=True, chunk=4
        )

    assert torch.autograd.gradcheck(both, (hidden, weight, bias), fast_mode=True)  # in random directions


def test_log_probs_of_many_ids_agree_with_the_whole_softmax_and_so_do_their_gradients() -> None:
    hidden, weight, bias, _ = parts()
    ids = torch.randint(0, V, (T, 6), generator=torch.Generator().manual_seed(1))
    ids[:, 1] = ids[:, 0]
    got = Head(weight, bias).ids_logprobs(hidden, ids, Distribution(temperature=0.9), chunk=4)
    expected = ((hidden @ weight.T + bias) / 0.9).log_softmax(-1).gather(-1, ids)
    torch.testing.assert_close(got, expected, atol=1e-10, rtol=1e-10)
    pull = torch.randn(T, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(
        torch.autograd.grad((pull * got).sum(), (hidden, weight, bias)),
        torch.autograd.grad((pull * expected).sum(), (hidden, weight, bias)),
    )


def test_a_teacher_gives_its_likeliest_tokens() -> None:
    hidden, weight, bias, _ = parts()
    ids, logprobs = Head(weight, bias).topk_logprobs(hidden, 4, Distribution(temperature=2.0), chunk=8)
    values, places = ((hidden @ weight.T + bias) / 2.0).log_softmax(-1).topk(4, dim=-1)
    assert torch.equal(ids, places)
    torch.testing.assert_close(logprobs, values.detach())


@pytest.mark.parametrize(("k", "below", "count"), [(4, 20, 4), (30, 20, 20), (99, None, V), (99, 2 * V, V)])
def test_a_teacher_names_only_what_its_student_knows_and_all_shares_the_mass(
    k: int, below: int | None, count: int
) -> None:
    hidden, weight, bias, _ = parts()
    ids, logprobs = Head(weight, bias).topk_logprobs(hidden, k, Distribution(), below=below)
    values, places = (hidden @ weight.T + bias).log_softmax(-1)[:, :below].topk(count, dim=-1)
    assert torch.equal(ids, places)
    torch.testing.assert_close(logprobs, values.detach())


def test_a_target_outside_the_support_is_taken_in() -> None:
    hidden, weight, bias, _ = parts()
    least = (hidden @ weight.T + bias).argmin(-1)
    logprobs, _ = Head(weight, bias).token_logprobs(hidden, least, Distribution(top_k=1))
    assert torch.isfinite(logprobs).all()
    assert (logprobs < -1).any()


def test_no_token_at_all_is_fine() -> None:
    hidden, weight, _, targets = parts()
    logprobs, entropy = Head(weight).token_logprobs(hidden[:0], targets[:0], Distribution(), with_entropy=True)
    logprobs.sum().backward()
    assert entropy is not None
    assert logprobs.shape == entropy.shape == (0,)
    assert weight.grad is not None
    assert not weight.grad.any()


def test_bfloat16_autocast_stays_within_its_rounding_and_answers_in_float32() -> None:
    hidden, weight, _, targets = (x.float().detach().requires_grad_() if x.is_floating_point() else x for x in parts())
    exact, _ = Head(weight).token_logprobs(hidden, targets, Distribution())
    with torch.autocast("cpu", torch.bfloat16):
        rounded, _ = Head(weight).token_logprobs(hidden, targets, Distribution())
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - exact).abs().max() < 0.2
    rounded.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.float32


@contextmanager
def saved_sizes() -> Iterator[list[int]]:
    """The numbers of elements of the tensors that are saved for the backward pass."""
    sizes: list[int] = []

    def note(x: Tensor) -> Tensor:
        sizes.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        yield sizes


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kept_products_change_no_bit(
    dtype: torch.dtype, distribution: Distribution, extra: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, bias, targets = parts()
    inputs = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight, bias)]
    whole = T * V * dtype.itemsize

    def results(room: int) -> list[Tensor]:
        monkeypatch.setattr(tiled_logprobs, "KEPT_BYTES", room)
        logprobs, entropy = Head(inputs[1], inputs[2], **extra).token_logprobs(
            inputs[0], targets, distribution, with_entropy=True, chunk=5
        )
        assert entropy is not None
        total = (logprobs + entropy).sum()
        twice = [torch.autograd.grad(total, inputs, retain_graph=True) for _ in range(2)]
        return [logprobs, entropy, *twice[0], *twice[1]]

    nothing, some, everything = (results(room) for room in (0, whole // 2, whole))
    for recomputed, partly, kept in zip(nothing, some, everything, strict=True):
        assert torch.equal(recomputed, kept)
        assert torch.equal(recomputed, partly)


@pytest.mark.parametrize(("room", "tokens"), [(0, 0), (V * 8 * 9, 5), (V * 8 * T, T), (2**30, T)])
def test_products_are_kept_up_to_a_limit(room: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 13 tokens in chunks of 5, only whole chunks are kept."""
    monkeypatch.setattr(tiled_logprobs, "KEPT_BYTES", room)
    hidden, weight, bias, targets = parts()
    with saved_sizes() as sizes:
        Head(weight, bias).token_logprobs(hidden, targets, Distribution(), chunk=5)
    others = weight.numel() + hidden.numel() + bias.numel() + 4 * T  # ids, normaliser, entropy, floor
    assert sum(sizes) == others + tokens * V


def test_nothing_is_kept_in_bfloat16() -> None:
    """There products are cheap, and the quickstart has to fit into 4 GiB."""
    hidden, weight, _, targets = parts()
    with saved_sizes() as sizes, torch.autocast("cpu", torch.bfloat16):
        Head(weight.float()).token_logprobs(hidden.float(), targets, Distribution())
    assert sum(sizes) == weight.numel() + hidden.numel() + 4 * T


def test_nothing_is_kept_for_a_pass_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[bool] = []
    forward = tiled_logprobs.TokenLogprobs.forward

    def spy(ctx: object, *arguments: object) -> object:
        copied.append(bool(arguments[-1]))
        return forward(ctx, *arguments)

    monkeypatch.setattr(tiled_logprobs.TokenLogprobs, "forward", spy)
    hidden, weight, _, targets = parts()
    with torch.no_grad():
        Head(weight).token_logprobs(hidden, targets, Distribution())
    Head(weight).token_logprobs(hidden, targets, Distribution())
    assert copied == [False, True]


def test_what_is_saved_beyond_the_limit_does_not_grow_with_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled_logprobs, "KEPT_BYTES", 0)
    hidden, weight, bias, targets = parts()
    with saved_sizes() as sizes:
        Head(weight, bias).token_logprobs(hidden, targets, DISTRIBUTIONS[-1], with_entropy=True)
    assert sizes
    assert max(sizes) <= max(weight.numel(), hidden.numel())


MEMORY = """
import resource, torch
from whet.models import tiled_logprobs
from whet.models.head import Head
from whet.core.types import Distribution
tiled_logprobs.KEPT_BYTES = 2**26
hidden, weight = torch.randn(4096, 16, requires_grad=True), torch.randn(40000, 16, requires_grad=True)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
targets = torch.zeros(4096, dtype=torch.long)
logprobs, _ = Head(weight).token_logprobs(hidden, targets, Distribution(), with_entropy=True)
logprobs.sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_peak_memory_is_far_below_the_logits() -> None:
    done = finished(program_fork(MEMORY))
    assert int(done.stdout) < 150 + 64, "MiB; the logits would be 625"


def tiny(kind: str) -> nn.Module:
    sizes = {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
    }
    builders = {
        "llama": lambda: tiny_llama(vocab=300),
        "qwen3": lambda: tiny_qwen3(vocab=300),
        "gemma3": lambda: tiny_gemma(vocab=300),
        "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**sizes, head_dim=8, final_logit_softcapping=2.0)),
        "granite": lambda: GraniteForCausalLM(GraniteConfig(**sizes, logits_scaling=4.0)),
        "cohere": lambda: CohereForCausalLM(CohereConfig(**sizes, logit_scale=0.25)),
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4)),
    }
    torch.manual_seed(0)
    return builders[kind]().double().eval()


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "gemma2", "granite", "cohere", "gpt2"])
def test_the_head_of_a_model_gives_the_models_own_log_probs(kind: str) -> None:
    model = tiny(kind)
    check_head(model)
    head = head_of(model)
    tokens = torch.randint(0, 300, (1, 9), generator=torch.Generator().manual_seed(0))
    own = model(input_ids=tokens, use_cache=False).logits[0].double().log_softmax(-1)
    hidden = model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state[0]
    ours, _ = head.token_logprobs(hidden[:-1], tokens[0, 1:], Distribution())
    torch.testing.assert_close(ours, own[:-1].gather(-1, tokens[0, 1:, None])[:, 0], atol=1e-9, rtol=1e-9)


def test_the_gradient_of_tied_embeddings_is_that_of_the_whole_model() -> None:
    model = tiny("qwen3")
    head = head_of(model)
    assert head.weight is model.get_input_embeddings().weight
    tokens = torch.randint(0, 300, (1, 9), generator=torch.Generator().manual_seed(0))
    model(input_ids=tokens, use_cache=False).logits[0, :-1].log_softmax(-1).gather(
        -1, tokens[0, 1:, None]
    ).sum().backward()
    expected = head.weight.grad.clone()
    model.zero_grad()
    hidden = model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state[0]
    head.token_logprobs(hidden[:-1], tokens[0, 1:], Distribution())[0].sum().backward()
    torch.testing.assert_close(head.weight.grad, expected, atol=1e-9, rtol=1e-9)


def test_a_head_that_is_not_a_plain_linear_map_is_refused() -> None:
    model = tiny("llama")
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(WhetError, match="not one plain Linear"):
        head_of(model)


def test_logits_that_the_config_does_not_explain_are_refused() -> None:
    model = tiny("llama")
    forward = model.forward

    def odd(*args: object, **kwargs: object) -> object:
        output = forward(*args, **kwargs)
        output.logits = output.logits * 1.5
        return output

    model.forward = odd
    with pytest.raises(WhetError, match="not supported"):
        check_head(model)
