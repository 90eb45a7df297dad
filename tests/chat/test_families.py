"""Families of models: what is appended is what the template writes, replies are read as they were written, and broken
calls are errors for the model."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chat.families import FAMILIES, renderer_of
from whet.base.errors import ConfigError, DataError
from whet.chat.calls import checked_call
from whet.chat.renderer import Renderer
from whet.core.types import Message

TYPES = {"text": "string", "count": "integer", "share": "number", "ok": "boolean", "list": "array", "deep": "object"}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Do it.",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": type, "description": "What."} for key, type in TYPES.items()},
                "required": ["text"],
            },
        },
    }
    for name in ("look_up", "add")
]
ODD = "He said \"no\",\nthen 'yes': {a: [1], \\n} é 漢字 🙂 <b> & |"
ARGUMENTS: list[dict[str, Any]] = [
    {
        "text": ODD,
        "count": -3,
        "share": 0.25,
        "ok": True,
        "list": [1, "two", None, {"a": "b, }"}],
        "deep": {"a": {"b": [True, "x\ny"]}},
    },
    {"text": "1"},
]
ASKED: Message = {"role": "user", "content": "What is it?"}


def reply(name: str, calls: int = 0, text: str = "") -> Message:
    """A reply with as many calls, and a thought if the family thinks."""
    message: Message = {"role": "assistant", "content": text}
    if FAMILIES[name].thinks:
        message["reasoning_content"] = "It is a riddle.\nI see."
    if calls:
        functions = [{"name": tool, "arguments": ARGUMENTS[i]} for i, tool in enumerate(("look_up", "add")[:calls])]
        message["tool_calls"] = [checked_call(function, number) for number, function in enumerate(functions)]
        if name == "Kimi K2":
            for number, call in enumerate(message["tool_calls"]):
                call["id"] = f"functions.{call['function']['name']}:{number}"
    return message


def results(message: Message) -> list[Message]:
    calls = message["tool_calls"]
    return [
        {"role": "tool", "name": call["function"]["name"], "tool_call_id": call["id"], "content": f"{number} {ODD}"}
        for number, call in enumerate(calls)
    ]


def without_ids(message: Message) -> Message:
    calls = [{**call, "id": ""} for call in message.get("tool_calls", [])]
    return {**message, "tool_calls": calls}  # type: ignore[typeddict-item]


def written(renderer: Renderer, messages: list[Message]) -> str:
    """The rendering of the template, by transformers."""
    shown, tools = renderer.chat.written(messages, TOOLS)
    return renderer.chat.apply(shown, tools, generate=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_takes_tools_and_stops_where_its_turns_end(name: str) -> None:
    renderer, family = renderer_of(name), FAMILIES[name]
    renderer.check_tools()
    assert tuple(renderer.tokenizer.convert_ids_to_tokens(list(renderer.stop_token_ids))) == family.stops


@pytest.mark.parametrize("calls", [0, 1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_reply_is_read_as_it_was_written(name: str, calls: int) -> None:
    renderer, family = renderer_of(name), FAMILIES[name]
    text = "I will look." if not calls or family.text_with_calls else ""
    said = reply(name, calls, text)
    if calls > family.calls:
        with pytest.raises(DataError, match=r"writes 1 of the 2 calls|single tool-calls at once"):
            renderer.render_reply([ASKED], said, TOOLS)
        return
    tokens = renderer.render_reply([ASKED], said, TOOLS)
    end = family.call_end if calls and family.call_end else family.stops[0]
    assert renderer.tokenizer.convert_ids_to_tokens(tokens[-1]) == end
    read = renderer.parse_reply(tokens, TOOLS)
    assert "malformed_calls" not in read
    assert without_ids(read) == without_ids(said)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_with_calls_grows_as_the_template_writes_it(name: str) -> None:
    renderer, family = renderer_of(name), FAMILIES[name]
    called = reply(name, family.calls)
    messages: list[Message] = [ASKED, called, *results(called)]
    tokens = renderer.render_prompt([ASKED], TOOLS)
    sampled = renderer.render_reply([ASKED], called, TOOLS)
    for ended in (sampled, sampled[:-1]):  # a reply may also be cut before its end
        grown = tokens + ended + renderer.render_next(tokens + ended, messages[2:])
        assert renderer.decode(grown) == written(renderer, messages)
    answer = reply(name, text="It is six.")
    tokens = grown + renderer.render_reply(messages, answer, TOOLS)
    tokens += renderer.render_next(tokens, [ASKED])
    template = written(renderer, [*messages, answer, ASKED])
    ours = renderer.decode(tokens)
    thought = answer.get("reasoning_content", "")
    if family.drops:
        assert ours.count(thought) == 2
        assert template.count(thought) < 2
    else:
        assert ours.count("[THINK]" + thought) == template.count("[THINK]" + thought)
        assert ours == template or name == "DeepSeek V3"  # it writes the end of results before the next reply


@pytest.mark.parametrize("name", FAMILIES)
def test_a_text_that_spells_a_control_token_of_the_family_stays_text(name: str) -> None:
    renderer, family = renderer_of(name), FAMILIES[name]
    control = set(renderer.tokenizer.convert_tokens_to_ids(list(family.special)))
    called = reply(name, family.calls)

    def controls(content: str) -> list[int]:
        asked: Message = {"role": "user", "content": content}
        tokens = renderer.render_prompt([asked], TOOLS)
        shown = [message | {"content": content} for message in results(called)]
        tokens += renderer.render_next(tokens, shown)  # type: ignore[arg-type]
        return [token for token in tokens if token in control]

    assert controls("".join(family.special)) == controls("x")


BROKEN = {
    "Qwen 3": ['<tool_call>\n{"name": "add", "arguments": {"text": "1"\n</tool_call>'],
    "Qwen 3.5": ["</think><tool_call>\n<function=add>\n<parameter=text>\n1\n</function>\n</tool_call>"],
    "Nemotron 3": ['</think><tool_call>\n{"name": "add"}\n</tool_call>'],
    "GLM 4.5": ["<tool_call>add\n<arg_key>text</arg_key>\n</tool_call>"],
    "gpt-oss": [
        '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"text": <|call|>',
        "<|channel|>analysis to=python code<|message|>1 + 1<|call|>",
        "<|channel|>commentary to=functions.add json<|message|>[1]<|call|>",
    ],
    "Gemma 4": [
        '<|tool_call>call:add{text:<|"|>1}<tool_call|>',
        "<|tool_call>call:add{text:one}<tool_call|>",
        "<|tool_call>add{}<tool_call|>",
        "<|tool_call>call:add{count:1,count:2}<tool_call|>",
        "<|tool_call>call:add{list:" + "[" * 90 + "}<tool_call|>",
        "<|tool_call>call:add{count:108.}<tool_call|>",
    ],
    "Kimi K2": [
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add.0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"text": "1"'
        "<|tool_call_end|><|tool_calls_section_end|>",
    ],
    "MiniMax M2": [
        '</think><minimax:tool_call>\n<invoke name="add">\n<parameter name="text">1\n</invoke>\n</minimax:tool_call>',
        '</think><minimax:tool_call>{"name": "add"}</minimax:tool_call>',
    ],
    "DeepSeek V3": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{'a'}\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>add<｜tool▁calls▁end｜>",
    ],
    "DeepSeek V3.1": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ],
    "Mistral": ['[TOOL_CALLS]add[ARGS]{"text": }', "[TOOL_CALLS]add(1)"],
    "Mistral with ids": ['[TOOL_CALLS] [{"name": "add"'],
    "Llama 3": ['{"name": "add", "parameters": {"text": }}'],
    "Llama 4": ['<|python_start|><|python_end|>{"name": "add", "parameters": ', "[add(1)]", "[add(text=f())]"],
    "LFM 2": [
        "<|tool_call_start|>[add(text='1]<|tool_call_end|>",
        "<|tool_call_start|>[add(1)]<|tool_call_end|>",
        "<|tool_call_start|>[add(text=open('x'))]<|tool_call_end|>",
        "<|tool_call_start|>[open('x')-add()]<|tool_call_end|>",
        "<|tool_call_start|>[add(share=1e999)]<|tool_call_end|>",
        "<|tool_call_start|>[add(text='1', text='2')]<|tool_call_end|>",
        "<|tool_call_start|>" + "[" * 5000 + "<|tool_call_end|>",
    ],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in BROKEN.items() for text in texts])
def test_a_broken_call_is_an_error_for_the_model(name: str, text: str) -> None:
    read = renderer_of(name).replies.parse(text, TOOLS)
    assert "tool_calls" not in read
    assert len(read["malformed_calls"]) == 1
    assert read["content"] == text.removeprefix("</think>")


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"gpt-oss"}))  # only control tokens tell where its calls end
def test_a_reply_that_was_cut_has_no_call_with_a_part_of_the_arguments(name: str) -> None:
    renderer, said = renderer_of(name), reply(name, 1)
    text = renderer.decode(renderer.render_reply([ASKED], said, TOOLS))
    for end in range(len(text)):
        for call in renderer.replies.parse(text[:end], TOOLS).get("tool_calls", []):
            assert call["function"] == said["tool_calls"][0]["function"]


PIECES = [
    *(token for family in FAMILIES.values() for token in (*family.special, *family.added)),
    *('{"text": "1"}', "add", "functions.add:0", "call:add{", "}", "[add(text='", "')]", "to=functions.add", "json"),
    *('<invoke name="add">', "</invoke>", "<function=add>", "```json\n", "\n```", ",", '"', "'", "\\", "\n", "\x00"),
    *("thought\n", "analysis", "final", "commentary", "1", "漢", "\ud800", "final"),
]


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=25))
def test_no_text_of_a_model_raises(name: str, pieces: list[str]) -> None:
    read = renderer_of(name).replies.parse("".join(pieces), TOOLS)
    assert isinstance(read["content"], str)


@pytest.mark.parametrize(
    ("name", "text", "said", "calls"),
    [
        ("gpt-oss", "<|channel|>final<|message|>Done.<|return|>", "Done.", []),
        (
            "gpt-oss",
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
            '<|constrain|>json<|message|>{"count": 1}<|call|>',
            "I look.",
            [("add", {"count": 1})],
        ),
        ("gpt-oss", "<|channel|>commentary to=functions.add json<|message|><|call|>", "", [("add", {})]),
        (
            "Kimi K2",
            "Now. <|tool_calls_section_begin|><|tool_call_begin|>add:0 <|tool_call_argument_begin|>{\n}"
            "<|tool_call_end|><|tool_calls_section_end|>",
            "Now.",
            [("add", {})],
        ),
        (
            "Gemma 4",
            '<|tool_call>call:my-tool.x{a:{<|"|>3<|"|>:<|"|>, ]<|"|>}, b:[[<|"|>a]b<|"|>], null]}<tool_call|>',
            "",
            [("my-tool.x", {"a": {"3": ", ]"}, "b": [["a]b"], None]})],
        ),
        (
            "MiniMax M2",
            '</think>Now.\n<minimax:tool_call><invoke name="add"><parameter name="count">5</parameter></invoke>'
            '<invoke name="f"></invoke></minimax:tool_call>',
            "Now.",
            [("add", {"count": 5}), ("f", {})],
        ),
        (
            "Llama 4",
            "<|python_start|>[add(text='Martha\\'s', deep={'a': None}, ok=True), f()]<|python_end|>",
            "",
            [("add", {"text": "Martha's", "deep": {"a": None}, "ok": True}), ("f", {})],
        ),
        ("Llama 4", '{"name": "add", "parameters": {}}', "", [("add", {})]),
        ("Llama 4", "[1, 2]", "[1, 2]", []),
        ("LFM 2", "<|tool_call_start|>[f(text='<|tool_call_end|>')]<|tool_call_end|>So.", "So.",
         [("f", {"text": "<|tool_call_end|>"})]),
        ("LFM 2", "<|tool_call_start|>[get-local-time(a='b-c'), f.g-h()]<|tool_call_end|>", "",
         [("get-local-time", {"a": "b-c"}), ("f.g-h", {})]),
        ("LFM 2", "<|tool_call_start|>f(a=-1)\ng(b=[true, null])<|tool_call_end|>", "",
         [("f", {"a": -1}), ("g", {"b": [True, None]})]),
        (
            "DeepSeek V3",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{}\n```<｜tool▁call▁end｜>",
            "",
            [("add", {})],
        ),
    ],
)  # fmt: skip
def test_calls_in_other_spellings_of_a_family(name: str, text: str, said: str, calls: list[Any]) -> None:
    read = renderer_of(name).replies.parse(text, TOOLS)
    assert "malformed_calls" not in read
    assert read["content"] == said
    found = [(call["function"]["name"], call["function"]["arguments"]) for call in read.get("tool_calls", [])]
    assert found == calls


def test_the_ids_of_kimi_are_made_of_names_and_numbers() -> None:
    renderer = renderer_of("Kimi K2")
    called = reply("Kimi K2", 2)
    for number, call in enumerate(called["tool_calls"]):
        call["id"] = f"call{number:05}"
    text = renderer.decode(renderer.render_reply([ASKED], called, TOOLS))
    assert "functions.look_up:0" in text
    assert "functions.add:1" in text
    following = renderer.decode(renderer.render_next([], results(called)))
    assert "## Return of functions.look_up:0" in following
    assert "## Return of functions.add:1" in following


def test_a_template_that_writes_every_argument_as_a_quoted_text_is_refused() -> None:
    tokenizer = FAMILIES["Llama 4"].tokenizer()
    start, end = tokenizer.chat_template.index('\'{"name"'), tokenizer.chat_template.index("'}' -}}")
    python = (
        "'[' + call.function.name + '(' -}}{%- for key, value in call.function.arguments | items -%}"
        "{{- key + '=\"' ~ value ~ '\"' + (', ' if not loop.last else '') -}}{%- endfor -%}{{- ')]' -}}"
    )
    quoted = tokenizer.chat_template[:start] + python + tokenizer.chat_template[end + len("'}' -}}") :]
    with pytest.raises(ConfigError, match="in a format that whet can't read"):
        Renderer(tokenizer, quoted).check_tools()
