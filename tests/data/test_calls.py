"""Replies are taken apart: thoughts, text and calls of tools; whatever a model writes, nothing raises."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny import tiny_tokenizer
from whet.data.calls import ReplyFormat, ResponseTemplate, format_of
from whet.data.renderer import Renderer
from whet.errors import ConfigError
from whet.types import Message

HERMES, LLAMA3, JSON = ReplyFormat("hermes"), ReplyFormat("llama3"), ReplyFormat("json")


def called(reply: Message) -> list[tuple[str, dict[str, Any]]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in reply.get("tool_calls", [])]


@pytest.mark.parametrize(
    ("format", "text", "said", "calls"),
    [
        (HERMES, 'So.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "So.", [("add", {"a": 1})]),
        (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}', "", [("add", {"a": 1})]),
        (HERMES, '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}', "", [("f", {}), ("g", {})]),
        (
            HERMES,
            '<tool_call>{"name": "f", "arguments": {"s": "</tool_call>"}}</tool_call>',
            "",
            [("f", {"s": "</tool_call>"})],
        ),
        (
            HERMES,
            "<tool_call>\n<function=f>\n<parameter=a>\n1 <\n2\n</parameter>\n</function>\n</tool_call>",
            "",
            [("f", {"a": "1 <\n2"})],
        ),
        (LLAMA3, '{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})]),
        (LLAMA3, '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}<|eom_id|>', "",
         [("f", {}), ("g", {})]),
        (JSON, '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]', "", [("f", {}), ("g", {})]),
        (JSON, '```json\n{"name": "f", "arguments": {}}\n```', "", [("f", {})]),
        (JSON, 'Now.[TOOL_CALLS] [{"name": "f", "arguments": {}}]', "Now.", [("f", {})]),
        (JSON, '{"answer": 3}', '{"answer": 3}', []),
        (JSON, 'The call is {"name": "f", "arguments": {}}', 'The call is {"name": "f", "arguments": {}}', []),
        (ReplyFormat(), '<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
    ],
)  # fmt: skip
def test_calls_are_read(format: ReplyFormat, text: str, said: str, calls: list[Any]) -> None:
    reply = format.parse(text)
    assert (reply["content"], called(reply)) == (said, calls)
    assert "malformed_calls" not in reply


@pytest.mark.parametrize(
    ("format", "text", "why"),
    [
        (HERMES, "<tool_call>add(1, 2)</tool_call>", "not valid JSON"),
        (HERMES, '<tool_call>{"name": "f", "arguments": {}} and</tool_call>', "something stands behind the JSON"),
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>', "not an object with a name"),
        (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "arguments are not an object"),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>', "there twice"),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "not a finite number"),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', "surrogate"),
        (HERMES, "<tool_call>" + "[" * 200_000, "nested too deeply|not valid JSON"),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1', "not valid JSON"),
        (HERMES, "<tool_call><function=f><parameter=a>1</function></tool_call>", "tags that end"),
        (LLAMA3, '{"name": "f", "parameters": {"a": }', "not valid JSON"),
        (LLAMA3, "<|python_tag|>print(1)", "not valid JSON"),
    ],
)
def test_what_looks_like_a_call_and_is_none_stays_and_says_why(format: ReplyFormat, text: str, why: str) -> None:
    reply = format.parse(text)
    assert reply["content"] == text
    assert "tool_calls" not in reply
    (reason,) = reply["malformed_calls"]
    assert re.search(why, reason)


def test_a_good_call_beside_a_bad_one_is_read() -> None:
    reply = HERMES.parse('<tool_call>{"name": "f"}</tool_call>\n<tool_call>oops</tool_call>')
    assert called(reply) == [("f", {})]
    assert reply["content"] == "<tool_call>oops</tool_call>"
    assert len(reply["malformed_calls"]) == 1


@pytest.mark.parametrize(
    ("opened", "text", "thought", "said"),
    [
        (False, "<think>\nhm\n</think>\n\nyes", "hm", "yes"),
        (False, "yes </think>", None, "yes </think>"),
        (False, "<think>never ends", "never ends", ""),
        (True, "hm\n</think>\n\nyes", "hm", "yes"),
        (True, "never ends", "never ends", ""),
    ],
)
def test_thoughts_are_kept_apart(opened: bool, text: str, thought: str | None, said: str) -> None:
    reply = ReplyFormat("hermes", thinks=True, opened=opened).parse(text)
    assert (reply.get("reasoning_content"), reply["content"]) == (thought, said)


def test_a_call_inside_of_a_thought_is_none() -> None:
    reply = ReplyFormat("hermes", thinks=True).parse('<think><tool_call>{"name": "f"}</tool_call></think>no')
    assert (called(reply), reply["content"]) == ([], "no")


@given(
    st.lists(st.sampled_from([*'<tool_call></tool_call>{}[]":,\\ \n', '"name"', "<think>", "</think>", "a\ud800", "é"]))
)
def test_no_text_raises(pieces: list[str]) -> None:
    text = "".join(pieces)
    for format in ("none", "hermes", "llama3", "json"):
        for thinks in (False, True):
            reply = ReplyFormat(format, thinks).parse(text)  # type: ignore[arg-type]
            assert isinstance(reply["content"], str)


def test_no_more_than_128_calls_are_read() -> None:
    text = '<tool_call>{"name": "f"}</tool_call>' * 1000
    assert len(HERMES.parse(text)["tool_calls"]) == 128


def test_the_format_is_that_in_which_a_template_writes_a_sample() -> None:
    assert format_of('<tool_call>{"name": "whetname", "arguments": {"whetkey": "whetvalue"}}') == "hermes"
    assert format_of('{"name": "whetname", "parameters": {"whetkey": "whetvalue"}}') == "llama3"
    assert format_of('[{"name": "whetname", "arguments": {"whetkey": "whetvalue"}}]') == "json"
    assert format_of("whetname(whetkey=whetvalue)") == format_of("nothing") == "none"


TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json"},
        "content": {},
    },
}


def test_a_tokenizers_own_response_template_is_used() -> None:
    format = ResponseTemplate(TEMPLATE, "<|im_start|>assistant\n")
    reply = format.parse('<think>hm</think>One.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>')
    assert (reply["content"], reply["reasoning_content"], called(reply)) == ("One.", "hm", [("f", {"a": 1})])
    for text in ("<tool_call>oops</tool_call>", " " * 5000, "x" * 500_000):
        bad = format.parse(text)
        assert bad["content"] == text
        assert len(bad["malformed_calls"]) == 1


def test_a_response_template_that_transformers_does_not_take_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"response_template can't be used: .*start_anchor"):
        ResponseTemplate({"fields": {"content": {}}}, "")


def test_the_renderer_takes_it_from_the_tokenizer() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.response_template = TEMPLATE
    assert called(Renderer(tokenizer).parse_reply(tokenizer.encode('<tool_call>{"name": "f"}</tool_call>'))) == [
        ("f", {})
    ]
