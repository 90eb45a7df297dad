"""Thoughts are opened, left out or ended by a budget; what is written for the model is never trained."""

import asyncio
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.tiny import tiny_tokenizer
from whet.base.errors import DataError
from whet.chat.renderer import Renderer
from whet.chat.thinking import split_thinking
from whet.core.types import Message
from whet.engines.base import Completion, SamplingParams
from whet.rollouts.sampling import Limits, Sampling
from whet.rollouts.session import Recording, Session

RENDERER = Renderer(tiny_tokenizer())


class Scripted:
    """Continues with the next text each time, cut to what it is asked for; ends by itself where that is shorter."""

    def __init__(self, *texts: str) -> None:
        self.texts, self.prompts, self.seeds = list(texts), list[str](), list[int]()

    async def sample(self, prompt: list[int], params: SamplingParams, session: str) -> Completion:
        self.prompts.append(RENDERER.decode(prompt))
        self.seeds.append(params.seed)
        tokens = [*RENDERER.encode_text(self.texts.pop(0)), RENDERER.stop_token_ids[0]][: params.max_new_tokens]
        ended = tokens[-1] == RENDERER.stop_token_ids[0]
        return Completion(tokens, [-1.0] * len(tokens), (2, 3), "stop" if ended else "length")


def said(generator: Scripted, **settings: Any) -> tuple[Session, Message]:
    sampling = Sampling(max_new_tokens=100, max_prompt_tokens=200, **settings)
    session = Session(Recording(generator, RENDERER, sampling, "t", seed=0))  # type: ignore[arg-type]
    return session, asyncio.run(session.reply([{"role": "user", "content": "2+2?"}])).message


def written(session: Session) -> list[tuple[str, bool]]:
    return [(RENDERER.decode(span.tokens), span.trained) for span in session.spans[1:]]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"finish_reason": "max_tokens"}, "the finish_reason 'max_tokens'; it must be one of stop, length, aborted"),
        ({"logprobs": [-1.0]}, "5 tokens with 1 log-probs"),
        ({"logprobs": [math.nan] * 5}, "a log-prob that is not a finite number"),
        ({"logprobs": ["-1.0"] * 5}, "a log-prob that is not a finite number"),
        ({"tokens": None}, "tokens, logprobs or likeliest that are not a list"),
        ({"tokens": [5.0] * 5}, "a token that is not an int"),
        ({"tokens": [-3] * 5}, "token -3 or -3, which no vocabulary has"),
        ({"tokens": [2**70] * 5}, "token .*, which no vocabulary has"),
        ({"tokens": [5] * 101, "logprobs": [-1.0] * 101}, "101 tokens where max_new_tokens is 100"),
        ({"logprobs": [1.5] * 5}, "the log-prob 1.5, which is above 0"),
        ({"versions": None}, "the versions None; they must be the oldest and the newest"),
        ({"versions": (3, 2)}, r"the versions \(3, 2\)"),
        ({"versions": 3}, "the versions 3;"),
        ({"cached": None}, "None cached tokens of a prompt of"),
        ({"cached": 10_000}, "10000 cached tokens of a prompt of"),
        ({"likeliest": [{}]}, "likeliest that doesn't have one dict for each of 5 tokens"),
        ({"experts": np.zeros((3, 1, 1))}, "experts that don't have one row for each of"),
        (None, "a dict, not a Completion"),
    ],
)
def test_an_engine_that_returns_something_else_is_named(change: dict[str, Any] | None, problem: str) -> None:
    class Other(Scripted):
        async def sample(self, prompt: list[int], params: SamplingParams, session: str) -> Completion:
            completion = await super().sample(prompt, params, session)
            return {} if change is None else replace(completion, **change)  # type: ignore[return-value]

    with pytest.raises(DataError, match=f"sample of the engine Other returned {problem}"):
        said(Other("four"))


def test_a_budget_ends_the_thoughts_and_the_answer_follows() -> None:
    generator = Scripted("a" * 50, "four")
    session, message = said(generator, thinking="on", thinking_budget=20)
    assert (message.get("reasoning_content"), message["content"]) == ("a" * 20, "four")
    assert [(text.strip("\n"), trained) for text, trained in written(session)] == [
        ("a" * 20, True), ("</think>", False), ("four" + RENDERER.decode(RENDERER.stop_token_ids[:1]), True)
    ]  # fmt: skip
    assert session.recording.usage.cut_thoughts == 1
    assert session.recording.usage.turns == 1
    assert generator.seeds[0] != generator.seeds[1]


def test_what_is_recorded_is_what_the_model_saw() -> None:
    generator = Scripted("a" * 50, "four")
    session, _ = said(generator, thinking="on", thinking_budget=20)
    tokens = [token for span in session.spans[:-1] for token in span.tokens]
    assert generator.prompts[-1] == RENDERER.decode(tokens)
    assert [span.logprobs is not None for span in session.spans] == [False, True, False, True]


def test_thoughts_that_end_in_time_are_left_alone() -> None:
    session, message = said(Scripted("hm</think>4"), thinking="on", thinking_budget=50)
    assert (message.get("reasoning_content"), message["content"]) == ("hm", "4")
    assert [trained for _, trained in written(session)] == [True]
    session, message = said(Scripted("hm</think>" + "4" * 30, "5"), thinking="on", thinking_budget=20)
    assert message["content"] == "4" * 10 + "5"
    assert [trained for _, trained in written(session)] == [True, True], "nothing is written into an answer"


def test_a_stop_text_that_begins_in_the_last_token_of_the_budget_ends_the_reply() -> None:
    session, message = said(Scripted("4" * 19 + "EN", "D and more"), thinking_budget=21, stop=("END",))
    assert message["content"] == "4" * 19 + "END"
    assert len(session.spans[-1].tokens) == len(session.spans[-1].logprobs or ()) == 1


def test_without_thoughts_a_budget_ends_nothing() -> None:
    session, message = said(Scripted("4" * 50, "5"), thinking_budget=20)
    assert message["content"] == "4" * 20 + "5"
    assert session.recording.usage.cut_thoughts == 0


def test_off_writes_empty_thoughts_and_on_opens_them_both_untrained() -> None:
    for mode, ending in (("off", "<think>\n\n</think>\n\n"), ("on", "<think>\n")):
        generator = Scripted("4")
        session, _ = said(generator, thinking=mode)
        assert generator.prompts[0].endswith(ending)
        assert session.spans[0].trained is False
        assert RENDERER.decode(session.spans[0].tokens).endswith(ending)


def test_a_budget_that_leaves_no_room_for_an_answer_ends_the_reply() -> None:
    session, _ = said(Scripted("a" * 200), thinking="on", thinking_budget=99)
    assert [trained for _, trained in written(session)] == [True]


def test_a_thought_without_an_end_is_no_answer() -> None:
    message = split_thinking({"role": "assistant", "content": "<think>\nit is 4"})
    assert (message["content"], message.get("reasoning_content")) == ("", "it is 4")


def test_an_environment_may_lower_limits_and_choose_its_mode() -> None:
    sampling = Sampling(max_new_tokens=100, max_turns=3)
    lowered = Limits(max_new_tokens=10, thinking="off", thinking_budget=4).under(sampling)
    assert (lowered.max_new_tokens, lowered.max_turns, lowered.mode) == (10, 3, "budget")
    assert not list(Limits(max_new_tokens=100).problems(sampling))
    assert list(Limits(max_turns=4).problems(sampling)) == [
        "sampling.max_turns = 4 is more than that of the run, sampling.max_turns = 3"
    ]
