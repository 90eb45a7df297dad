"""The way in which segments attend is chosen by device, precision and model, and tried."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.test_forest_attention import DEEP, LENGTHS, build, forest
from whet.base.errors import ConfigError
from whet.models.attention import choice as attention_choice
from whet.models.attention import flex as flex_attention
from whet.models.attention import row as row_attention
from whet.models.attention.choice import choose_attention
from whet.models.attention.forest import forest_hidden, use_forest_attention

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def a_model(**config: Any) -> Any:
    settings = SimpleNamespace(**{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16} | config)
    model: Any = nn.Linear(1, 1)
    model.config = SimpleNamespace(get_text_config=lambda: settings)
    return model


def test_auto_takes_the_first_kernel_that_the_model_allows_and_whose_trial_succeeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[str] = []
    works = {"varlen", "flex"}
    monkeypatch.setattr(attention_choice, "_works", lambda name, *_: tried.append(name) or name in works)
    assert choose_attention("auto", a_model(), GPU, half=True, spread=False) == "varlen"
    assert choose_attention("auto", a_model(), GPU, half=True, spread=True) == "varlen"
    assert choose_attention("auto", a_model(attn_logit_softcapping=50.0), GPU, half=True, spread=False) == "flex"
    assert choose_attention("auto", a_model(head_dim=20), GPU, half=True, spread=False) == "flex"
    assert choose_attention("auto", a_model(head_dim=512), GPU, half=True, spread=False) == "flex"
    assert choose_attention("auto", a_model(v_head_dim=8), GPU, half=True, spread=True) == "blocks"
    assert tried == ["varlen", "varlen", "flex", "flex", "flex"]
    works.clear()
    tried.clear()
    assert choose_attention("auto", a_model(), GPU, half=True, spread=False) == "blocks"
    assert tried == ["varlen", "flex"]
    assert choose_attention("auto", a_model(), GPU, half=False, spread=False) == "blocks"
    assert choose_attention("auto", a_model(), CPU, half=True, spread=False) == "blocks"
    assert choose_attention("auto", a_model(attention_dropout=0.1), GPU, half=True, spread=False) == "blocks"
    assert len(tried) == 2, "nothing else is tried"


@pytest.mark.parametrize(
    ("wanted", "config", "device", "half", "spread"),
    [("flex", {}, GPU, False, False), ("varlen", {}, CPU, False, True), ("varlen", {}, GPU, True, True),
     ("blocks", {}, GPU, True, False)],
)  # fmt: skip
def test_what_is_asked_for_is_taken_without_a_trial(
    wanted: Any, config: dict[str, Any], device: torch.device, half: bool, spread: bool
) -> None:
    assert choose_attention(wanted, a_model(**config), device, half=half, spread=spread) == wanted


@pytest.mark.parametrize(
    ("wanted", "config", "device", "half", "spread", "words"),
    [
        ("flex", {}, CPU, True, False, "no backward pass on CPUs"),
        ("flex", {}, GPU, True, True, r"parallel\.context"),
        ("flex", {"attention_dropout": 0.1}, GPU, True, False, "dropout in its attention"),
        ("varlen", {"attention_dropout": 0.1}, CPU, True, False, "dropout in its attention"),
        ("varlen", {"attn_logit_softcapping": 30.0}, CPU, True, False, "soft caps"),
        ("varlen", {"v_head_dim": 8}, GPU, True, False, "values of another size"),
        ("varlen", {}, GPU, False, False, r"learner\.precision=bfloat16"),
        ("varlen", {"head_dim": 12}, GPU, True, False, "heads of size 12"),
        ("varlen", {"head_dim": 264}, GPU, True, False, "multiples of 8 up to 256"),
    ],
)
def test_what_is_asked_for_and_cannot_be_used_is_refused(
    wanted: Any, config: dict[str, Any], device: torch.device, half: bool, spread: bool, words: str
) -> None:
    with pytest.raises(ConfigError, match=rf"learner\.attention = {wanted}, but .*{words}"):
        choose_attention(wanted, a_model(**config), device, half=half, spread=spread)


def test_sinks_are_left_to_blocks() -> None:
    with pytest.raises(ConfigError, match="or sinks"):
        choose_attention("varlen", build("gpt_oss"), CPU, half=False, spread=False)


def test_a_kernel_that_fails_or_is_wrong_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The trial itself, on a CPU: FlexAttention's kernel is a fake that has gradients."""

    def right(q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, scale: float, enable_gqa: bool, **_: Any) -> Tensor:
        at = torch.arange(q.shape[2])
        sees = block_mask.mask_mod(0, 0, at[:, None], at)
        return nn.functional.scaled_dot_product_attention(q, k, v, sees, scale=scale, enable_gqa=enable_gqa)

    def fails(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("no compiler")

    for kernel, works in ((right, True), (lambda *a, **b: right(*a, **b) * 1.1, False), (fails, False)):
        monkeypatch.setattr(flex_attention, "_kernel", lambda kind, kernel=kernel: kernel)
        assert attention_choice._works("flex", a_model(), CPU) == works
    assert "FlexAttention is off by 0.1" in caplog.text
    assert "FlexAttention does not run here, so it is not used: no compiler" in caplog.text

    assert attention_choice._works("varlen", a_model(), CPU)
    scores = row_attention._scores
    monkeypatch.setattr(row_attention, "_scores", lambda *given: scores(*given) * 1.2)
    assert not attention_choice._works("varlen", a_model(), CPU)
    assert "FlashAttention is off by" in caplog.text


def test_the_layout_of_the_chosen_kernel_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from whet.models.attention import varlen as varlen_attention

    model, calls = build("llama"), []
    use_forest_attention(model)
    attend = row_attention.attend
    monkeypatch.setattr(varlen_attention, "attend", lambda *given: calls.append(1) or attend(*given))
    batch, _ = forest(DEEP, LENGTHS)
    forest_hidden(model, batch)
    assert not calls
    forest_hidden(model, batch, attention="varlen")
    assert calls
