"""Even loads of experts by biases: the rule against its words, and what a learner does with it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.learner.parts import (
    SMALL,
    VOCABULARY,
    PolicyGradient,
    assert_same,
    cut,
    published,
    save_model,
    some_batch,
    weights,
    whole,
    worker,
)
from tests.tiny import tiny_deepseek, tiny_qwen3_moe
from whet.base.errors import WhetError
from whet.learner.balance import BIAS, balanced
from whet.models.config import LoraSettings

RATE = 0.01
SIZES = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("deepseek"), tiny_deepseek(VOCABULARY, **SIZES))


def learner(path: Path, rate: float | None = RATE, **settings: Any) -> Any:
    more = settings.pop("learner", {})
    return worker(path, learner={"balance": rate, **more}, **settings)


def biases(own: Any) -> dict[str, torch.Tensor]:
    return {name: b.clone() for name, b in own.model.named_buffers() if name.endswith(BIAS)}


def test_fewer_than_the_mean_raises_and_more_lowers_a_bias_by_the_rate() -> None:
    bias, loads = torch.tensor([0.5, -0.5, 0.0, 0.1, 0.1]), [0, 10, 4, 3, 3]
    found = balanced(bias, torch.tensor(loads), 0.25).tolist()
    mean = sum(loads) / len(loads)
    for new, old, load in zip(found, bias.tolist(), loads, strict=True):
        assert new == pytest.approx(old + (0.25 if load < mean else -0.25 if load > mean else 0.0))


def test_a_step_moves_each_bias_by_the_tokens_of_all_micro_batches(deepseek: Path) -> None:
    own, batch = learner(deepseek), some_batch(share_prompts=False)
    router = own.model.model.layers[1].mlp.gate
    chosen: list[torch.Tensor] = []
    handle = router.register_forward_hook(lambda module, args, output: chosen.append(output[2]))
    pieces = cut(batch, 30)
    own.score(pieces, {"logprobs"})
    loads = torch.cat(chosen).flatten().bincount(minlength=8)
    handle.remove()
    update = own.update(pieces, PolicyGradient())
    (bias,) = biases(own).values()
    assert len(pieces) > 1
    assert torch.equal(bias, balanced(torch.zeros_like(bias), loads, RATE))
    assert bias.abs().max() == pytest.approx(RATE)
    worst = float(loads.max() / loads.double().mean())
    assert update.metrics.result()["experts/max_load"] == pytest.approx(worst)


@pytest.mark.parametrize("recomputed", [False, True])
def test_each_token_counts_once_however_often_it_is_computed(deepseek: Path, recomputed: bool) -> None:
    own = learner(deepseek, learner={"activation_checkpointing": recomputed})
    pieces = cut(some_batch(share_prompts=False), 30)
    for _ in range(2):
        own.score(pieces, {"logprobs"})
        own.update(pieces, PolicyGradient())
        (loads,) = own.balance._loads.values()
        assert loads.sum() == 2 * sum(len(piece.batch) for piece in pieces), "two experts of each token"


def test_loads_depend_neither_on_what_is_shared_nor_on_how_a_batch_is_cut(deepseek: Path) -> None:
    found = []
    for shared, most in ((False, 100), (True, 100), (True, 17)):
        own, pieces = learner(deepseek), cut(some_batch(share_prompts=shared), most)
        own.update(pieces, PolicyGradient())
        found.append((len(pieces), next(iter(own.balance._loads.values())).tolist()))
    assert [count for count, _ in found] == [1, 1, 3]
    assert found[0][1] == found[1][1] == found[2][1]


def test_loads_become_more_even(deepseek: Path) -> None:
    loads = []
    own = learner(deepseek, rate=0.02)
    for _ in range(12):
        loads.append(own.update(whole(some_batch()), PolicyGradient()).metrics.result()["experts/max_load"])
    assert min(loads[-3:]) < loads[0] - 0.2


@pytest.mark.parametrize("settings", [{}, {"lora": LoraSettings(rank=2, alpha=4.0)}], ids=["all", "lora"])
def test_biases_are_saved_published_and_gone_on_with(deepseek: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    straight = learner(deepseek, **settings)
    straight.update(whole(some_batch(0)), PolicyGradient())
    (bias,) = biases(straight).values()
    assert torch.equal(published(straight)[f"model.layers.1.mlp.gate.{BIAS}"], bias)
    straight.state.save(tmp_path)
    resumed = learner(deepseek, seed=5, **settings)
    resumed.state.load(tmp_path)
    for step in (1, 2):
        for own in (straight, resumed):
            own.update(whole(some_batch(step)), PolicyGradient())
    assert_same(biases(straight), biases(resumed))
    assert_same(weights(straight), weights(resumed))


def test_a_rate_of_0_counts_and_changes_nothing(tmp_path: Path) -> None:
    path = save_model(tmp_path, tiny_qwen3_moe(VOCABULARY, **SIZES, moe_intermediate_size=8))
    counting, plain = learner(path, rate=0.0), learner(path, rate=None)
    metrics = [own.update(whole(some_batch()), PolicyGradient()).metrics.result() for own in (counting, plain)]
    assert metrics[0]["experts/max_load"] > 1
    assert "experts/max_load" not in metrics[1]
    assert_same(weights(counting), weights(plain))
    with pytest.raises(WhetError, match=r"learner\.balance = 0\.01 moves the biases of routers, but .*mlp has none"):
        learner(path)


def test_a_model_without_experts_is_refused(llama: Path) -> None:
    with pytest.raises(WhetError, match=r"learner\.balance is for experts"):
        learner(llama)


def test_a_skipped_step_moves_no_bias(deepseek: Path) -> None:
    from tests.learner.parts import Poisoned

    own = learner(deepseek)
    assert own.update(whole(some_batch()), Poisoned()).skipped
    assert not any(bias.any() for bias in biases(own).values())
