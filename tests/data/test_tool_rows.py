"""Rows whose replies call tools: the calls train, the tools and their results don't, and nothing gets lost."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer
from whet.base.errors import DataError
from whet.chat.renderer import Renderer
from whet.core.types import Trajectory
from whet.data.rows import LabelledRows, SupervisedRows

# In the manner of Qwen's: results of tools stand in a user's turn, several of them in one.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}{% for message in messages %}"
    "{% if message.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<result>{{ message.content }}</result>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% elif message.role == 'assistant' %}<|im_start|>assistant\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</call>'
    "{% endfor %}<|im_end|>\n"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def call(**arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", "arguments": arguments}}


CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "1 + 2, and 3 + 4?"},
    {"role": "assistant", "content": None, "tool_calls": [call(a=1, b=2), call(a=3, b=4)]},
    {"role": "tool", "content": "3"},
    {"role": "tool", "content": "7"},
    {"role": "assistant", "content": "3 and 7.", "tool_calls": None},
    {"role": "user", "content": "And their sum?"},
    {"role": "assistant", "content": "I add. ", "tool_calls": [call(a=3, b=7)]},
    {"role": "tool", "content": "10"},
    {"role": "assistant", "content": "10"},
]


def read(tmp_path: Path, template: str = TEMPLATE, **row: Any) -> Trajectory:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": CHAT, "tools": TOOLS} | row) + "\n")
    (group,) = SupervisedRows(path=str(path)).groups(Renderer(tiny_tokenizer(template)))["train"]
    return group.trajectories[0]


def texts(trajectory: Trajectory, trained: bool) -> list[str]:
    return [tiny_tokenizer().decode(span.tokens) for span in trajectory.spans if span.trained == trained]


def test_calls_train_and_tools_and_their_results_do_not(tmp_path: Path) -> None:
    trajectory = read(tmp_path)
    assert texts(trajectory, trained=True) == [
        '<call>{"name": "add", "arguments": {"a": 1, "b": 2}}</call>'
        '<call>{"name": "add", "arguments": {"a": 3, "b": 4}}</call><|im_end|>',
        "3 and 7.<|im_end|>",
        'I add. <call>{"name": "add", "arguments": {"a": 3, "b": 7}}</call><|im_end|>',
        "10<|im_end|>",
    ]
    given = "".join(texts(trajectory, trained=False))
    assert '"name": "add", "parameters"' in given
    assert all(f"<result>{number}</result>" in given for number in (3, 7, 10))


def test_the_tokens_equal_the_templates_rendering_of_the_conversation(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(TEMPLATE)
    messages = [message | {"content": message["content"] or ""} for message in CHAT]
    whole = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False)
    assert tokenizer.decode(read(tmp_path).tokens) + "\n" == whole


def test_tools_may_be_json_text_and_contents_parts_of_text(tmp_path: Path) -> None:
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} if m.get("content") else m for m in CHAT]
    plain, other = (tmp_path / name for name in ("plain", "other"))
    plain.mkdir()
    other.mkdir()
    assert texts(read(other, tools=json.dumps(TOOLS), messages=parts), True) == texts(read(plain), True)
    for wrong in ("[", "{}", '[{"a": 1, "a": 2}]'):
        with pytest.raises(DataError, match=r"rows\.jsonl:1: field 'tools' must be a list"):
            read(tmp_path, tools=wrong)


def test_arguments_may_be_json_as_in_the_openai_api(tmp_path: Path) -> None:
    as_json = [dict(message) for message in CHAT]
    for message in as_json:
        calls = [each["function"] for each in message.get("tool_calls") or ()]
        if calls:
            message["tool_calls"] = [
                {"function": each | {"arguments": json.dumps(each["arguments"])}} for each in calls
            ]
    assert texts(read(tmp_path, messages=as_json), True) == texts(read(tmp_path), True)
    for wrong in ("add(1, 2)", "[1, 2]", [1, 2], [["a", 1]], 5, True):  # tables have maps as lists of pairs
        as_json[1]["tool_calls"] = [{"function": {"name": "add", "arguments": wrong}}]
        with pytest.raises(DataError, match=r"rows\.jsonl:1: field 'messages\[1\]' must hold .*'arguments'"):
            read(tmp_path, messages=as_json)


@pytest.mark.parametrize("arguments", [{}, {"arguments": None}, {"arguments": []}, {"arguments": " "}])
def test_a_call_without_arguments(tmp_path: Path, arguments: dict[str, Any]) -> None:
    as_table, given = ([dict(message) for message in CHAT] for _ in range(2))
    as_table[1]["tool_calls"] = [{"function": {"name": "add", **arguments}}]
    given[1]["tool_calls"] = [{"function": {"name": "add", "arguments": {}}}]
    assert texts(read(tmp_path, messages=as_table), True) == texts(read(tmp_path, messages=given), True)
    as_table[1]["tool_calls"] = [{"function": {"name": "add", "parameters": {"a": 1}}}]
    with pytest.raises(DataError, match=r"rows\.jsonl:1: field 'messages\[1\]' must hold .*'arguments'"):
        read(tmp_path, messages=as_table)


def test_rows_without_tools_may_call_them_and_judged_rows_too(tmp_path: Path) -> None:
    assert "Tools:" not in "".join(texts(read(tmp_path, tools=None), trained=False))
    path = tmp_path / "labelled.jsonl"
    path.write_text(json.dumps({"messages": CHAT[:2], "tools": TOOLS, "label": False}) + "\n")
    (group,) = LabelledRows(path=str(path)).groups(Renderer(tiny_tokenizer(TEMPLATE)))["train"]
    assert texts(group.trajectories[0], trained=True)[0].startswith('<call>{"name": "add"')
    assert group.episodes[0].reward == 0


@pytest.mark.parametrize(
    ("template", "row", "lost"),
    [
        (CHAT_TEMPLATE, {}, "the tools"),
        (CHAT_TEMPLATE, {"tools": None}, "the tool calls of a reply"),
        (TEMPLATE.replace("\n<result>{{ message.content }}</result>", ""), {}, "a message of the role 'tool'"),
    ],
    ids=["tools", "calls", "results"],
)
def test_a_template_that_leaves_something_out_is_refused(
    tmp_path: Path, template: str, row: dict[str, Any], lost: str
) -> None:
    with pytest.raises(DataError, match=rf"rows\.jsonl:1: field 'messages': the chat template leaves out {lost}"):
        read(tmp_path, template, **row)


def test_a_reply_with_calls_ends_the_thought_that_the_prompt_opens(tmp_path: Path) -> None:
    thinking = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
    trained = texts(read(tmp_path, thinking), trained=True)
    assert trained == ["\n</think>\n\n" + text for text in texts(read(tmp_path), trained=True)]


def test_a_row_that_the_template_refuses_is_named(tmp_path: Path) -> None:
    strict = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}{% endfor %}"
    )
    with pytest.raises(DataError, match=r"rows\.jsonl:1: field 'messages': .*no tools here"):
        read(tmp_path, strict + CHAT_TEMPLATE)
    with pytest.raises(DataError, match=r"rows\.jsonl:1: field 'messages': the chat template can't render"):
        read(
            tmp_path,
            "{% for m in messages %}{% if m.tool_calls %}{{ m.content + 1 }}{% endif %}{% endfor %}" + TEMPLATE,
        )


@pytest.mark.parametrize("wrong", ["add", 3, {"name": "add"}, ["add"], [None], json.dumps(TOOLS[0])])
def test_tools_of_another_type_are_refused(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:1: field 'tools(\[0\])?' must be (a list|an object)"):
        read(tmp_path, tools=wrong)


@pytest.mark.parametrize("wrong", ["add", 3, {}, ["add"], [{}], [{"function": "add"}], [{"function": {"name": None}}]])
def test_calls_of_another_type_are_refused(tmp_path: Path, wrong: Any) -> None:
    messages = [CHAT[0], {"role": "assistant", "content": "x", "tool_calls": wrong}]
    with pytest.raises(DataError, match=r"rows\.jsonl:1: field 'messages\[1\]' must hold 'tool_calls' that are a list"):
        read(tmp_path, messages=messages)


@pytest.mark.parametrize("calls", [None, []])
def test_a_reply_without_text_and_without_calls_is_refused(tmp_path: Path, calls: Any) -> None:
    for content in ("", None):
        messages = [CHAT[0], {"role": "assistant", "content": content, "tool_calls": calls}]
        with pytest.raises(DataError, match=r"rows\.jsonl:1: field 'messages\[1\]' must"):
            read(tmp_path, messages=messages)
