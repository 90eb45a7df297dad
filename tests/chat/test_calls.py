"""Replies are parsed into thoughts, text and tool calls; no text of a model raises an error."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.chat_templates import FAMILIES
from tests.tiny import tiny_tokenizer
from whet.base.errors import ConfigError
from whet.chat.call_formats import SAMPLES, CallFormat, format_of
from whet.chat.notations.parts import MOST
from whet.chat.renderer import Renderer
from whet.chat.replies import ReplyFormat, ResponseTemplate
from whet.chat.thinking import TAGS as THINK
from whet.core.types import Message

CALL = CallFormat("json", "<tool_call>", "</tool_call>")
HERMES, JSON, MISTRAL = (
    ReplyFormat(CALL),
    ReplyFormat(CallFormat("json")),
    ReplyFormat(CallFormat("json", "[TOOL_CALLS]")),
)
TAGS = ReplyFormat(CallFormat("tags", "<tool_call>", "</tool_call>"))
KEYS = ReplyFormat(CallFormat("keys", "<tool_call>", "</tool_call>"))
NAMED = ReplyFormat(CallFormat("named", "[TOOL_CALLS]"))
GRANITE = ReplyFormat(CallFormat("json", "<|tool_call|>"))
PROPERTIES = {
    "s": {"type": "string"},
    "n": {"type": "integer"},
    "b": {"type": "boolean"},
    "xs": {"type": "array"},
    "p": {"$ref": "#/$defs/P"},
    "e": {"$ref": "#/$defs/E"},
    "o": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}
PARAMETERS = {"$defs": {"P": {"type": "object"}, "E": {"enum": ["1", "2"]}}, "properties": PROPERTIES}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]


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
            TAGS,
            "<tool_call>\n<function=f>\n<parameter=a>\n1 <\n2\n</parameter>\n</function>\n</tool_call>",
            "",
            [("f", {"a": "1 <\n2"})],
        ),
        (JSON, '{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})]),
        (JSON, '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}<|eom_id|>', "",
         [("f", {}), ("g", {})]),
        (JSON, '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]', "", [("f", {}), ("g", {})]),
        (JSON, '```json\n{"name": "f", "arguments": {}}\n```', "", [("f", {})]),
        (HERMES, '<tool_call>[{"name": "f"}, {"name": "g"}]</tool_call>', "", [("f", {}), ("g", {})]),
        (MISTRAL, 'Now.[TOOL_CALLS] [{"name": "f", "arguments": {}}] Wait.', "Now. Wait.", [("f", {})]),
        (GRANITE, '<|tool_call|>[{"name": "f", "arguments": {}}]', "", [("f", {})]),
        (TAGS, "So.<function=f>\n<parameter=a>\n1\n</parameter>\n</function>", "So.", [("f", {"a": "1"})]),
        (TAGS, "<tool_call><function=f></function></tool_call><function=g></function>", "", [("f", {}), ("g", {})]),
        (KEYS, "<tool_call>f<arg_key>a</arg_key><arg_value>1 <\n2</arg_value>\n</tool_call>\n<tool_call>g</tool_call>",
         "", [("f", {"a": "1 <\n2"}), ("g", {})]),
        (NAMED, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{}', "", [("f", {"a": 1}), ("g", {})]),
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
        (HERMES, '<tool_call>{"name": "f", "arguments": {}} and</tool_call>', "there is text after the JSON"),
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>', "not an object with a name"),
        (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "arguments are not an object"),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>', "duplicate key"),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "not a finite number"),
        (
            HERMES,
            '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>',
            "U\\+D800, which is not a character",
        ),
        (
            HERMES,
            '<tool_call>{"name": "f", "arguments": {"a": "\\ud900\\udc00"}}</tool_call>',
            "U\\+50000, which is not a",
        ),
        (
            HERMES,
            f'<tool_call>{{"name": "f", "arguments": {{"a": {"[" * 65}{"]" * 65}}}}}</tool_call>',
            "nested too deeply",
        ),
        (
            HERMES,
            f'<tool_call>{{"name": "f", "arguments": {{"a": {"9" * 400}}}}}</tool_call>',
            "number that is too large",
        ),
        (HERMES, f'<tool_call>{{"name": "f", "arguments": {{"a": {"9" * 5000}}}}}</tool_call>', "4300 digits"),
        (HERMES, "<tool_call>" + "[" * 200_000, "nested too deeply|not valid JSON"),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1', "not valid JSON"),
        (HERMES, "<tool_call><function=f></function></tool_call>", "not valid JSON"),
        (TAGS, "<tool_call><function=f><parameter=a>1</function></tool_call>", "closed tags"),
        (TAGS, "<tool_call><function=f><parameter=a>1<parameter=b>2</parameter></function></tool_call>", "has no end"),
        (TAGS, '<tool_call>{"name": "f"}</tool_call>', "not a function in tags"),
        (KEYS, "<tool_call>f<arg_key>a</arg_key></tool_call>", "closed tags"),
        (KEYS, '<tool_call>{"name": "f"}</tool_call>', "does not begin with a name"),
        (NAMED, "[TOOL_CALLS]f[ARGS]oops", "not valid JSON"),
        (JSON, '{"name": "f", "parameters": {"a": }', "not valid JSON"),
        (JSON, "<|python_tag|>print(1)", "not valid JSON"),
    ],
)
def test_an_invalid_call_stays_in_the_text_with_the_reason(format: ReplyFormat, text: str, why: str) -> None:
    reply = format.parse(text)
    assert reply["content"] == text
    assert "tool_calls" not in reply
    (reason,) = reply["malformed_calls"]
    assert re.search(why, reason)


def test_a_valid_call_next_to_an_invalid_one_is_read() -> None:
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
    reply = ReplyFormat(CALL, THINK, opened).parse(text)
    assert (reply.get("reasoning_content"), reply["content"]) == (thought, said)


def test_a_call_in_a_thought_is_ignored() -> None:
    reply = ReplyFormat(CALL, THINK).parse('<think><tool_call>{"name": "f"}</tool_call></think>no')
    assert (called(reply), reply["content"]) == ([], "no")


PIECES = [
    *'<tool_call></tool_call>{}[]":,\\ \n',
    '"name"',
    "<think>",
    "</think>",
    "a\ud800",
    "é",
    "f",
    "[TOOL_CALLS]",
    "[ARGS]",
]
PIECES += ["<function=f>", "</function>", "<parameter=a>", "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>"]
PIECES += ["</arg_value>", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}']


@given(st.lists(st.sampled_from(PIECES)))
def test_no_text_raises(pieces: list[str]) -> None:
    text = "".join(pieces)
    for format in (ReplyFormat(), HERMES, JSON, TAGS, KEYS, NAMED):
        for thoughts in (None, THINK):
            reply = ReplyFormat(format.calls, thoughts).parse(text, TOOLS)
            assert isinstance(reply["content"], str)


def test_at_most_128_calls_are_read_and_the_rest_is_an_error() -> None:
    one = '{"name": "f", "arguments": {}}'
    for format, text in ((HERMES, f"<tool_call>{one}</tool_call>" * 1000), (JSON, f"[{', '.join([one] * 1000)}]")):
        reply = format.parse(text)
        assert len(reply["tool_calls"]) == MOST == 128
        assert reply["malformed_calls"] == ["only the first 128 calls of a reply are read"]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("s=1", {"s": "1"}),
        ("n=1", {"n": 1}),
        ("n=one", {"n": "one"}),
        ("b=True", {"b": True}),
        ("b=false", {"b": False}),
        ("xs=[1, 2]", {"xs": [1, 2]}),
        ('p={"a": [1]}', {"p": {"a": [1]}}),
        ("e=1", {"e": "1"}),
        ("o=null", {"o": None}),
        ("o=7", {"o": "7"}),
        ("unknown=7", {"unknown": "7"}),
    ],
)
def test_arguments_without_quotes_have_the_types_of_the_tool(written: str, read: dict[str, Any]) -> None:
    key, _, value = written.partition("=")
    tagged = f"<tool_call><function=f><parameter={key}>\n{value}\n</parameter></function></tool_call>"
    keyed = f"<tool_call>f\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
    assert called(TAGS.parse(tagged, TOOLS)) == called(KEYS.parse(keyed, TOOLS)) == [("f", read)]


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        [],
        {"properties": []},
        {"properties": {"a": None}},
        {"properties": {"a": {"type": [{}]}}},
        {"properties": {"a": {"anyOf": 5}}},
        {"properties": {"a": {"enum": None}}},
        {"$defs": 1, "properties": {"a": {"$ref": "#/$defs/A"}}},
    ],
)
def test_a_schema_that_makes_no_sense_gives_texts(parameters: Any) -> None:
    text = "<tool_call><function=f><parameter=a>[1]</parameter></function></tool_call>"
    tools: list[Any] = [{"function": {"name": "f", "parameters": parameters}}, {"function": 1}, {"name": []}]
    assert called(TAGS.parse(text, tools)) == [("f", {"a": "[1]"})]
    assert JSON.parse("So\n[1]", tools)["content"] == "So\n[1]"


@pytest.mark.parametrize(
    "text",
    [
        'I will.\n{"name": "f", "parameters": {"n": 1}}',
        '{"name": "f", "parameters": {"n": 1}}\nI wait.',
        'So:\n```json\n[{"name": "f", "arguments": {"n": 1}}]\n```',
    ],
)
def test_a_call_of_a_declared_tool_on_a_separate_line_is_read_next_to_text(text: str) -> None:
    reply = JSON.parse(text, TOOLS)
    assert called(reply) == [("f", {"n": 1})]
    assert reply["content"] in ("I will.", "I wait.", "So:")
    other = JSON.parse(text.replace('"f"', '"g"'), TOOLS)
    assert "tool_calls" not in other, "it may be the answer"


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (JSON, '<function=f>{"n": 1}</function>'),
        (JSON, '<tool_call>{"name": "f"}</tool_call>'),
        (HERMES, '<|tool_call|>[{"name": "f", "arguments": {}}]'),
        (HERMES, '<TOOLCALL>[{"name": "f", "arguments": {}}]</TOOLCALL>'),
        (HERMES, 'functools[{"name": "f", "arguments": {}}]'),
        (NAMED, '<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>'),
    ],
)
def test_a_call_in_the_format_of_another_family_is_malformed_if_there_are_tools(format: ReplyFormat, text: str) -> None:
    assert "malformed_calls" not in format.parse(text)
    (why,) = format.parse(text, TOOLS)["malformed_calls"]
    assert "this model writes calls otherwise" in why


ARGUMENTS = '{"whetkey": "whetvalue", "whetlist": [1, {"whetdeep": true}], "whetcount": 2}'
WRITTEN = '{"name": "whetname", "arguments": ' + ARGUMENTS + "}"


@pytest.mark.parametrize(
    ("written", "format"),
    [
        (f"<tool_call>\n{WRITTEN}\n</tool_call>", CALL),
        (WRITTEN, CallFormat("json")),
        (WRITTEN.replace("arguments", "parameters"), CallFormat("json")),
        (f"[TOOL_CALLS] [{WRITTEN}]", CallFormat("json", "[TOOL_CALLS]")),
        (f"<TOOLCALL>[{WRITTEN}]</TOOLCALL>", CallFormat("json", "<TOOLCALL>", "</TOOLCALL>")),
        (f"<tool_calls>\n{WRITTEN}\n</tool_calls>", CallFormat("json", "<tool_calls>", "</tool_calls>")),
        (f"functools[{WRITTEN}]", CallFormat("json", "functools")),
        (
            f"<|action_start|><|plugin|>\n{WRITTEN}<|action_end|>",
            CallFormat("json", "<|action_start|><|plugin|>", "<|action_end|>"),
        ),
        (f"[TOOL_CALLS]whetname[ARGS]{ARGUMENTS}", CallFormat("named", "[TOOL_CALLS]")),
        (f"[TOOL_CALLS]whetname[CALL_ID]call00000[ARGS]{ARGUMENTS}", CallFormat("named", "[TOOL_CALLS]")),
        (f"functions.whetname:0<|tool_call_argument_begin|>{ARGUMENTS}", None),
        ("[whetname(whetkey='whetvalue', whetlist=[1, {'whetdeep': True}], whetcount=2)]", None),
        (WRITTEN.replace('"', "'"), None),
        ("nothing", None),
    ],
)
def test_the_format_of_a_template_is_detected_and_read_back(written: str, format: CallFormat | None) -> None:
    assert format_of(written) == format
    if format is not None:
        found = format.read(f"So. {written}" if format.before else written, [])
        assert found.calls[0]["function"]["name"] == SAMPLES[0]["function"]["name"]


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


def test_a_response_template_that_does_not_read_what_the_chat_template_writes_is_refused_for_tools() -> None:
    tokenizer = FAMILIES["Qwen3"].tokenizer()
    tokenizer.response_template = TEMPLATE
    Renderer(tokenizer).check_tools()
    tokenizer.response_template = {**TEMPLATE, "fields": {"content": {}}}
    with pytest.raises(ConfigError, match="in a format that whet can't read"):
        Renderer(tokenizer).check_tools()


def test_the_renderer_takes_it_from_the_tokenizer() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.response_template = TEMPLATE
    assert called(Renderer(tokenizer).parse_reply(tokenizer.encode('<tool_call>{"name": "f"}</tool_call>'))) == [
        ("f", {})
    ]
