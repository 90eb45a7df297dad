"""Random conversations with tools, thoughts, odd Unicode and fake control tokens, in templates of well-known models:
appending keeps what was there, a reply that is written is read as it was, and no text becomes a control token."""

import random
from collections import Counter
from typing import Any

import pytest

from tests.chat.families import PUBLISHED
from tests.data.chat_templates import FAMILIES
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer
from whet.base.errors import ConfigError
from whet.chat.calls import checked_call
from whet.chat.renderer import Renderer
from whet.chat.replies import ReplyFormat
from whet.chat.thinking import opens_thought
from whet.core.types import Message, ToolCall

NAMES = ("SmolLM2", "Qwen3", "Llama 3", "Hermes", "Gemma")
RENDERERS = {name: Renderer(FAMILIES[name].tokenizer(), tools_as_text=not FAMILIES[name].tools) for name in NAMES}
ODD = [
    "é",
    "漢字",
    "🙂",
    "👩\u200d👧",
    "\u200b",
    "\u202e",
    "a\u0301",
    "\x00",
    "\x7f",
    "\ufffd",
    "\U0003fffd",
    "\t",
    "\r\n",
]
ODD += ['"', "'", "\\", "{{ x }}", "{% raw %}", "<", "|", "&lt;", "</tool_response>", "<tools>", "null", "ﷺ"]
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "description": "Do it.", "parameters": {
        "type": "object", "properties": {"a": {"type": "string", "description": "What."}}, "required": ["a"]}}},
]  # fmt: skip


def text(rng: random.Random, fakes: list[str]) -> str:
    """Words, odd characters and spellings of control tokens, with a word at both ends, for templates trim."""
    words = ["yes", "no", " ", "12", ".", "\n\n"]
    parts = [rng.choice(rng.choice([words, words, ODD, fakes])) for _ in range(rng.randint(0, 6))]
    return "".join(["I", *parts, "end"])


def reply(rng: random.Random, fakes: list[str], name: str) -> Message:
    family = FAMILIES[name]
    plain = [fake for fake in fakes if "tool" not in fake and "think" not in fake and "python" not in fake]
    calls: list[ToolCall] = [
        checked_call(
            {"name": "f", "arguments": {"a": text(rng, fakes), "n": rng.choice([1, 2.5, None, [True]])}}, number
        )
        for number in range(rng.choice([0, 1, 1 if name == "Llama 3" else 3]))
    ]
    alone = bool(calls) and (name == "Llama 3" or rng.random() < 0.5)  # Llama's template joins text and call
    message: Message = {"role": "assistant", "content": "" if alone else text(rng, plain)}
    if calls:
        message["tool_calls"] = calls
    if "</think>" in family.template:
        message["reasoning_content"] = text(rng, plain)
    return message


@pytest.mark.parametrize(
    "numbers", [range(60), pytest.param(range(60, 1000), marks=pytest.mark.slow)], ids=["60", "1000"]
)
@pytest.mark.parametrize("name", NAMES)
def test_random_conversations_keep_prefix_and_replies_and_spell_no_control_token(name: str, numbers: range) -> None:
    renderer, family = RENDERERS[name], FAMILIES[name]
    fakes = [*family.special, *family.added, "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]
    control = set(renderer.tokenizer.convert_tokens_to_ids(list(family.special)))
    plain: Message = {"role": "user", "content": "x"}
    opening = Counter(renderer.render_prompt([plain], TOOLS))
    for number in numbers:
        rng = random.Random(f"{name} {number}")
        messages: list[Message] = [{"role": "user", "content": text(rng, fakes)}]
        if rng.random() < 0.5:
            messages.insert(0, {"role": "system", "content": text(rng, fakes)})
        tokens = renderer.render_prompt(messages, TOOLS)
        for token in control:
            spare = 1 if messages[0]["role"] == "system" else 0  # a system message has additional marks
            assert tokens.count(token) <= opening[token] + spare
        for _ in range(rng.randint(1, 3)):
            said = reply(rng, fakes, name)
            sampled = renderer.render_reply([plain], said, TOOLS)
            assert sum(token in control for token in sampled) == 1
            assert sampled[-1] == renderer.end_of_turn
            assert renderer.parse_reply(sampled) == said
            results: list[Message] = [
                {"role": "tool", "name": "f", "tool_call_id": call["id"], "content": text(rng, fakes)}
                for call in said.get("tool_calls", [])
            ] or [{"role": "user", "content": text(rng, fakes)}]
            following = renderer.render_next(tokens + sampled, results)
            harmless = renderer.render_next(tokens + sampled, [result | {"content": "x"} for result in results])  # type: ignore[misc]
            assert [token for token in following if token in control] == [
                token for token in harmless if token in control
            ]
            tokens = tokens + sampled + following


def test_a_template_that_leaves_out_the_tools_is_refused_with_a_way_out() -> None:
    for name in ("SmolLM2", "Gemma"):
        with pytest.raises(ConfigError, match="leaves out the tools; set tools_as_text: true"):
            Renderer(FAMILIES[name].tokenizer()).check_tools()
        RENDERERS[name].check_tools()
    for name in ("Qwen3", "Llama 3", "Hermes"):
        RENDERERS[name].check_tools()
    called = "{% for c in message.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments }}){% endfor %}"
    unread = CHAT_TEMPLATE.replace("<|im_end|>", called + "<|im_end|>", 1)
    with pytest.raises(ConfigError, match="in a format that whet can't read"):
        Renderer(tiny_tokenizer("{{ tools }}" + unread)).check_tools()


READ = {
    "qwen2_5": "json", "qwen3": "json", "qwen3_instruct_2507": "json", "qwen3_vl": "json", "llama3_1": "json",
    "llama3_2": "json", "glm4moe": "keys", "nemotron_3_nano": "tags", "nemotron_3_super": "tags",
    "qwen3_5_think": "tags", "qwen3_5_nothink": "tags", "qwen3_6": "tags",
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_calls_of_published_templates_are_read_back_with_their_types(name: str) -> None:
    renderer = Renderer(tiny_tokenizer(), (PUBLISHED / f"{name}.jinja").read_text())
    renderer.check_tools()
    assert isinstance(renderer.replies, ReplyFormat)
    assert renderer.replies.calls is not None
    assert renderer.replies.calls.body == READ[name]
    types = {"s": "string", "n": "integer", "xs": "array", "o": "object", "b": "boolean"}
    properties = {key: {"type": type} for key, type in types.items()}
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"properties": properties}}}
    arguments = {"s": "1", "n": 1, "xs": [1, "2"], "o": {"a": None}, "b": True}
    sampled = renderer.chat.as_sampled(
        [checked_call({"name": "f", "arguments": arguments}, 0)], renderer._turns.closing
    )
    written = f"</think>{sampled}" if opens_thought(renderer.chat.question()) else sampled
    reply = renderer.parse_reply(renderer.encode_text(written), [tool])
    assert [call["function"] for call in reply["tool_calls"]] == [{"name": "f", "arguments": arguments}]


@pytest.mark.parametrize("name", ["gemma3", "lfm2", "deepseekv3", "cohere"])
def test_published_templates_whose_calls_are_not_read_back_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="set tools_as_text: true"):
        Renderer(tiny_tokenizer(), (PUBLISHED / f"{name}.jinja").read_text()).check_tools()


def test_tools_calls_and_results_as_text() -> None:
    renderer = RENDERERS["SmolLM2"]
    calls = [checked_call({"name": "f", "arguments": {"a": "é"}}, number) for number in range(2)]
    messages: list[Message] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "A", "reasoning_content": "T"},
    ]
    whole = renderer.decode(renderer.render_whole(messages, TOOLS))
    assert whole.startswith("<|im_start|>system\nBe brief.\n\nYou may call functions.")
    assert '"name": "f", "description": "Do it."' in whole
    one = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{one}\n{one}<|im_end|>" in whole
    assert (
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>"
        in whole
    )
    assert whole.endswith("<|im_start|>assistant\n<think>\nT\n</think>\n\nA<|im_end|>\n")
    assert renderer.left_out(messages, TOOLS) is None


def test_a_thought_is_written_where_the_prompt_opens_it() -> None:
    renderer = Renderer(FAMILIES["R1"].tokenizer())
    said: Message = {"role": "assistant", "content": "A", "reasoning_content": "T"}
    sampled = renderer.render_reply([{"role": "user", "content": "Q"}], said)
    assert renderer.decode(sampled) == "T\n</think>\n\nA<｜end▁of▁sentence｜>"
    assert renderer.parse_reply(sampled) == said
    quick: Message = {"role": "assistant", "content": "A"}
    assert renderer.decode(renderer.render_reply([{"role": "user", "content": "Q"}], quick)).startswith(
        "\n</think>\n\nA"
    )
