"""Text of an unfinished reply that a client was shown is never taken back."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chat.test_calls import CALL, GRANITE, HERMES, JSON, KEYS, MISTRAL, NAMED, TAGS, TOOLS
from tests.tiny import tiny_tokenizer
from whet.chat.call_formats import CallFormat
from whet.chat.draft import Draft, decided
from whet.chat.renderer import Renderer
from whet.chat.replies import ReplyFormat
from whet.chat.thinking import TAGS as THINK
from whet.chat.thinking import Marks, split_thinking

FORMATS = [ReplyFormat(), HERMES, JSON, MISTRAL, TAGS, KEYS, NAMED, GRANITE, ReplyFormat(CallFormat("llama4"))]
MARKS: list[Marks | None] = [None, THINK, ("[THINK]", "[/THINK]")]
PARTS = [
    *("<think>", "</think>", "<thi", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>", "<tool", "<function=f>"),
    *("</function>", "[TOOL_CALLS]", '{"name": "f", "arguments": {}}', "[", "{", "```", "```json", "<|tool_call|>"),
    *("<|python_tag|>", "<|python_start|>", "<|python_end|>", "[f()]", "f[ARGS]{}", "<arg_key>s</arg_key>"),
    *(" ", "\n", "\n\n", "a", "word ", "so.", "<"),
]


@settings(max_examples=1000, deadline=None)
@given(
    format=st.sampled_from(FORMATS),
    marks=st.sampled_from(MARKS),
    opened=st.booleans(),
    thinking=st.booleans(),
    tools=st.booleans(),
    parts=st.lists(st.sampled_from(PARTS), max_size=8),
)
def test_what_is_decided_is_the_beginning_of_the_whole_reply(
    format: ReplyFormat, marks: Marks | None, opened: bool, thinking: bool, tools: bool, parts: list[str]
) -> None:
    text, read = "".join(parts), ReplyFormat(format.calls, marks, opened)
    thinking = thinking and marks in (None, THINK)  # other marks are refused with settings of thinking
    reply = read.parse(text, TOOLS if tools else None)
    reply = split_thinking(reply) if thinking else reply
    whole = reply.get("reasoning_content", ""), str(reply["content"])
    shown = [decided(read, text[:end], thinking) for end in range(len(text) + 1)]
    for before, after in itertools.pairwise([*shown, whole]):
        assert all(new.startswith(old) for old, new in zip(before, after, strict=True)), (text, before, after)


@pytest.mark.parametrize(
    ("format", "text", "shown"),
    [
        (HERMES, "Let me add. ", ("", "Let me add.")),
        (HERMES, "Let me <tool", ("", "Let me")),
        (HERMES, "Let me <tool_call>{", ("", "Let me")),
        (HERMES, "1 < 2 and <b", ("", "1 < 2 and <b")),
        (HERMES, " maybe", ("", "")),
        (ReplyFormat(), " maybe ", ("", " maybe ")),
        (JSON, "The sum is {", ("", "The sum is {")),
        (JSON, '{"name"', ("", "")),
        (JSON, "So:\n[", ("", "So:")),
        (ReplyFormat(CALL, THINK), "<thi", ("", "")),
        (ReplyFormat(CALL, THINK), "<think>\nEasy.\n</thi", ("Easy.", "")),
        (ReplyFormat(CALL, THINK), "<think>\nEasy.\n</think>\n\nIt is 4", ("Easy.", "It is 4")),
        (ReplyFormat(CALL, THINK, opened=True), "Easy", ("Easy", "")),
        (ReplyFormat(CALL, ("[THINK]", "[/THINK]")), "Easy", ("", "")),
    ],
    ids=str,
)
def test_text_is_held_back_until_it_is_decided(format: ReplyFormat, text: str, shown: tuple[str, str]) -> None:
    assert decided(format, text) == shown


@given(st.text(max_size=30), st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_tokens_become_the_text_that_they_are_together(text: str, size: int) -> None:
    renderer = Renderer(tiny_tokenizer(), tools_as_text=True)
    tokens = renderer.tokenizer.encode(text, add_special_tokens=False)
    draft = Draft(renderer)
    for start in range(0, len(tokens), size):
        draft.add(tokens[start : start + size])
        assert str(renderer.parse_reply(tokens)["content"]).startswith(draft.text)


def test_the_end_of_a_turn_and_half_a_character_are_not_shown() -> None:
    renderer = Renderer(tiny_tokenizer(), tools_as_text=True)
    tokens = renderer.encode_text("a😀")
    assert len(tokens) > 2, "the tokenizer has the character as one token"
    draft = Draft(renderer)
    assert draft.add(tokens[:1])
    assert not draft.add(tokens[1:2])
    assert draft.text == "a"
    assert draft.add([*tokens[2:], renderer.stop_token_ids[0]])
    assert draft.text == "a😀"


def test_a_tokenizer_that_cleans_up_spaces_shows_nothing() -> None:
    tokenizer: Any = tiny_tokenizer()
    tokenizer.clean_up_tokenization_spaces = True
    draft = Draft(Renderer(tokenizer, tools_as_text=True))
    assert not draft.add(tokenizer.encode("a b"))
