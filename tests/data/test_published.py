"""Rows in the columns of published data sets become conversations and pairs."""

from typing import Any

import pytest

from tests.tiny import tiny_tokenizer
from whet.base.errors import DataError
from whet.chat.renderer import Renderer
from whet.config import Component
from whet.data.base import ROWS
from whet.data.row_kinds import Conversation, Example, Preference
from whet.data.rows import FileRows

USER, REPLY = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}


def messages(kind: type[Example], **values: Any) -> list[Any]:
    return [answer.messages for answer in kind.of("rows.jsonl:1", values).answers]


@pytest.mark.parametrize(
    "values",
    [
        {"messages": [USER, REPLY]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]},
        {"conversations": [USER, REPLY]},
        {"instruction": "Hi", "input": "", "output": "Hello!", "text": "Below is an instruction ..."},
        {"instruction": "Hi", "context": "", "response": "Hello!", "category": "open_qa"},
        {"prompt": "Hi", "prompt_id": "7", "messages": [USER, REPLY]},
    ],
    ids=["messages", "sharegpt", "conversations", "alpaca", "dolly", "ultrachat"],
)
def test_a_conversation_in_a_published_form(values: dict[str, Any]) -> None:
    assert messages(Conversation, **values) == [[USER, REPLY]]


def test_the_rest_of_an_instruction_belongs_to_the_question() -> None:
    for more, answer in (("input", "output"), ("context", "response")):
        ((question, _),) = messages(Conversation, **{"instruction": "Add", more: "1 and 2", answer: "3"})
        assert question == {"role": "user", "content": "Add\n\n1 and 2"}


def test_system_messages_calls_and_results_of_sharegpt() -> None:
    turns = [
        {"from": "human", "value": "weather?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Rome"}}'},
        {"from": "observation", "value": "sunny"},
        {"from": "gpt", "value": "It is sunny."},
    ]
    (whole,) = messages(Conversation, conversations=turns, system="Be brief.")
    assert [message["role"] for message in whole] == ["system", "user", "assistant", "tool", "assistant"]
    assert whole[2]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Rome"}}
    turns[1]["value"] = "weather(Rome)"
    with pytest.raises(DataError, match=r"rows.jsonl:1: field 'conversations\[1\]' must hold a call as JSON"):
        messages(Conversation, conversations=turns)
    with pytest.raises(DataError, match=r"field 'conversations\[0\]' must have a text 'value' and a 'from'"):
        messages(Conversation, conversations=[{"from": "narrator", "value": "Once"}])


BETTER, WORSE = [USER, REPLY], [USER, {"role": "assistant", "content": "No."}]


@pytest.mark.parametrize(
    "values",
    [
        {"prompt": "Hi", "chosen": "Hello!", "rejected": "No."},
        {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello!", "rejected": "\n\nHuman: Hi\n\nAssistant: No."},
        {"prompt": "Hi", "messages": BETTER, "chosen": BETTER, "rejected": WORSE, "score_chosen": 8.0},
        {"prompt": [USER], "chosen": REPLY, "rejected": WORSE[1]},
        {
            "conversations": [{"from": "human", "value": "Hi"}],
            "chosen": {"from": "gpt", "value": "Hello!"},
            "rejected": {"from": "gpt", "value": "No."},
        },
        {"instruction": "Hi", "input": "", "chosen": "Hello!", "rejected": "No."},
    ],
    ids=["texts", "hh", "ultrafeedback", "single messages", "sharegpt", "alpaca"],
)
def test_a_pair_in_a_published_form(values: dict[str, Any]) -> None:
    assert messages(Preference, **values) == [BETTER, WORSE]


def test_a_transcript_keeps_all_turns() -> None:
    start = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\nd"
    chosen, rejected = messages(Preference, chosen=f"{start}\n\nAssistant: e", rejected=f"{start}\n\nAssistant: f")
    assert [message["content"] for message in chosen] == ["a", "b", "c\nd", "e"]
    assert chosen[:3] == rejected[:3]


PUBLISHED: dict[str, dict[str, Any]] = {
    "alpaca": {"instruction": "Hi", "input": "", "output": "Hello!", "text": "Below ..."},
    "dolly": {"instruction": "Hi", "context": "", "response": "Hello!", "category": "open_qa"},
    "openmathinstruct2": {
        "problem": "Hi", "generated_solution": "Hello!", "expected_answer": "1", "problem_source": "math",
    },
    "llama_nemotron": {
        "version": "v1.1", "input": [USER], "output": "Hello!", "category": "chat", "license": "cc-by-4.0",
        "reasoning": "off", "generator": "Llama-3.3-70B-Instruct", "used_in_training": "yes", "system_prompt": "",
    },
    "nemotron_post_training_v1": {
        "uuid": "1", "license": "CC BY 4.0", "generator": "Qwen3-235B-A22B", "version": "1.0", "category": "chat",
        "reasoning": "off", "messages": [{**USER, "tool_calls": []}, {**REPLY, "tool_calls": []}],
        "metadata": '{"conversation_id": "1"}',
    },
    "nemotron_post_training_v2": {
        "uuid": "1", "license": "cc-by-4.0", "generator": "Qwen3-235B-A22B", "version": "2.0", "category": "chat",
        "reasoning": "off", "messages": [USER, REPLY],
    },
    "numinamath_cot": {"source": "olympiads", "problem": "Hi", "solution": "Hello!", "messages": [USER, REPLY]},
    "tulu3_sft": {"id": "1", "messages": [USER, REPLY], "source": "flan"},
    "ultrachat": {"prompt": "Hi", "prompt_id": "1", "messages": [USER, REPLY]},
    "hh": {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello!", "rejected": "\n\nHuman: Hi\n\nAssistant: No."},
    "helpsteer3": {
        "domain": "general", "language": "english", "context": [USER], "response1": "No.", "response2": "Hello!",
        "overall_preference": 2, "individual_preference": [{"score": 2, "reasoning": "...", "feedback1": "..."}],
    },
    "tulu3_preference": {"id": "1", "source": "x", "prompt": "Hi", "chosen": BETTER, "rejected": WORSE},
    "ultrafeedback": {
        "prompt": "Hi", "prompt_id": "1", "chosen": BETTER, "rejected": WORSE, "messages": BETTER,
        "score_chosen": 8.0, "score_rejected": 3.0,
    },
}  # fmt: skip


def named(name: str) -> FileRows:
    kind, preset = Component(ROWS).resolve(name)
    rows = preset or kind()
    assert isinstance(rows, FileRows)
    return rows


def test_every_published_set_has_a_row_here() -> None:
    assert ROWS.keys() - PUBLISHED.keys() == {"supervised", "preference", "labelled", "scored", "traces", "mixture"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_set_is_read_in_its_columns(name: str) -> None:
    rows, values = named(name), PUBLISHED[name]
    assert rows.path.startswith("hf:")
    renamed = {own: values[theirs] for own, theirs in rows.columns.items()}
    row = rows.kind.of("hub:1", {**values, **renamed})
    whole = [BETTER, WORSE] if "chosen" in row.model_dump() or name == "helpsteer3" else [BETTER]
    assert [answer.messages for answer in row.answers] == whole
    group = rows.group(row, Renderer(tiny_tokenizer()))
    assert rows.unusable(group) is None
    assert [episode.reward for episode in group.episodes] == ([1.0, 0.0] if len(whole) == 2 else [0.0])


def test_the_system_prompt_of_nemotron_is_a_message() -> None:
    rows = named("llama_nemotron")
    values = {"prompt": [USER], "completion": "Hello!", "system": "detailed thinking on"}
    (answer,) = rows.kind.of("hub:1", values).answers
    assert answer.messages == [{"role": "system", "content": "detailed thinking on"}, USER, REPLY]


def test_ties_are_left_out() -> None:
    rows = named("helpsteer3")
    row = rows.kind.of("hub:1", {**PUBLISHED["helpsteer3"], "overall_preference": 0})
    assert rows.unusable(rows.group(row, Renderer(tiny_tokenizer()))) == "no answer is preferred"
    with pytest.raises(DataError, match="overall_preference"):
        rows.kind.of("hub:1", {**PUBLISHED["helpsteer3"], "overall_preference": 4})
