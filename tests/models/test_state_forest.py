"""Prompts shared by copies of the states at their end, against separate runs of every path: states and gradients."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from tests.grids import taking_turns
from tests.models.test_forest_attention import forest, separately, states_and_gradients
from tests.tiny import tiny_granite, tiny_qwen3_5
from whet.base.errors import WhetError
from whet.models.attention.forest import decoder_of, forest_hidden

FAMILIES = [tiny_qwen3_5, tiny_granite]
TOLERANCE = 1e-5  # their scans and norms are in float32, whatever the weights are


def build(family: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    model = family(dtype=torch.float64)
    model.set_experts_implementation("eager")
    return model.train()


@pytest.mark.parametrize("family", taking_turns(FAMILIES, [tiny_qwen3_5]))
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 20)), min_size=1, max_size=9))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_forest_equals_separate_runs_in_states_and_gradients(
    family: Callable[..., PreTrainedModel], segments: list[tuple[int, int]]
) -> None:
    model = build(family)
    parents = [min(parent, number) - 1 for number, (parent, _) in enumerate(segments)]
    batch, paths = forest(parents, [length for _, length in segments])
    expected, gradients = states_and_gradients(model, separately(model, batch, paths))
    found, own = states_and_gradients(model, forest_hidden(model, batch))
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
    scale = max(float(gradient.abs().max()) for gradient in gradients)
    torch.testing.assert_close(own, gradients, atol=TOLERANCE * scale, rtol=TOLERANCE)


def tokens_of_calls(model: PreTrainedModel, parents: list[int], lengths: list[int], *, lockstep: bool) -> list[int]:
    calls: list[int] = []
    decoder_of(model).register_forward_pre_hook(
        lambda _module, _args, given: calls.append(given["input_ids"].numel()), with_kwargs=True
    )
    forest_hidden(model, forest(parents, lengths)[0], lockstep=lockstep)
    return calls


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_is_computed_once_and_all_its_answers_together(family: Callable[..., PreTrainedModel]) -> None:
    assert tokens_of_calls(build(family), [-1, 0, 0, 0, 0], [50, 8, 7, 8, 8], lockstep=False) == [50, 4 * 8]


def test_rows_that_share_nothing_are_padded_to_those_of_similar_length_unless_ranks_run_in_lockstep() -> None:
    lengths = [900, 20, 890, 24]
    assert tokens_of_calls(build(tiny_granite), [-1] * 4, lengths, lockstep=False) == [2 * 24, 2 * 900]
    assert tokens_of_calls(build(tiny_granite), [-1] * 4, lengths, lockstep=True) == [4 * 900]


@pytest.mark.parametrize("why", ["lockstep", "checkpointing"])
def test_shared_prompts_are_refused_where_states_would_be_lost(why: str) -> None:
    model = build(tiny_granite)
    if why == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(WhetError, match="share_prompts=False"):
        forest_hidden(model, forest([-1, 0], [5, 4])[0], lockstep=why == "lockstep")
