"""Conversations are rendered by appending: sampled and earlier tokens are never rendered again."""

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.other_tokenizers import INSTRUCT, bpe_tokenizer, metaspace_tokenizer
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer, vocab_id
from whet.base.errors import ConfigError, DataError
from whet.chat.renderer import Renderer

END = vocab_id("<|im_end|>")
# Templates in the manner of well-known models, with their habits.
THINKING = (  # drops the thinking of all but the last reply, and writes an empty one into it (Qwen3)
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENS_THINKING = (  # the prompt opens a tag that finished replies lack (R1)
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
BRACKETS = (  # no newline after a turn, text is trimmed (Mistral)
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}<|im_end|>"
    "{% else %}{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)
TEMPLATES = {
    "chatml": CHAT_TEMPLATE,
    "plain": "plain",
    "thinking": THINKING,
    "opens thinking": OPENS_THINKING,
    "brackets": BRACKETS,
}


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.fixture(params=TEMPLATES)
def renderer(request):
    return Renderer(tiny_tokenizer(), TEMPLATES[request.param])


def test_a_conversation_appended_turn_by_turn_equals_the_templates_rendering():
    renderer = Renderer(tiny_tokenizer())
    conversation = [{"role": "system", "content": "s"}, user("a\nb"), assistant("c"), user("d"), assistant("é")]
    tokens = renderer.render_prompt(conversation[:2])
    tokens += renderer.render_reply(conversation[:2], conversation[2])
    tokens += renderer.render_next(tokens, conversation[3:4])
    tokens += renderer.render_reply(conversation[:4], conversation[4])
    whole = tiny_tokenizer().apply_chat_template(conversation, tokenize=False)
    assert renderer.decode(tokens) + "\n" == whole


@pytest.mark.parametrize("takes_spaces", [False, True])
def test_what_follows_a_control_token_is_tokenised_as_after_it(takes_spaces):
    """A tokenizer that puts a space before a text, but not after control tokens (Llama 2), or whose control tokens take
    the spaces after them (Phi 3)."""
    letters = ["▁", "\n", *"abcdefghijklmnopqrstuvwxyz"]
    plain = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    plain.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    ends = [AddedToken(spelling, rstrip=takes_spaces) for spelling in ("<|user|>", "<|assistant|>", "<|end|>")]
    plain.add_special_tokens(ends)
    template = (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<|end|>", chat_template=template)
    conversation = [user("a b"), assistant("c d"), user("e f")]
    renderer = Renderer(tokenizer)
    tokens = [*renderer.render_prompt(conversation[:1]), *plain.encode("c d").ids[1:], plain.token_to_id("<|end|>")]
    assert [*tokens, *renderer.render_next(tokens, conversation[2:])] == renderer.render_prompt(conversation)


def test_the_next_tokens_are_the_same_if_the_reply_lacks_its_end(renderer):
    prompt = renderer.render_prompt([user("question")])
    sampled = renderer.tokenizer.encode("some <think>thoughts</think> reply ", add_special_tokens=False)
    cut = prompt + sampled
    ended = [*cut, END]
    assert cut + renderer.render_next(cut, [user("next")]) == ended + renderer.render_next(ended, [user("next")])
    added = renderer.decode(renderer.render_next(ended, [user("next")]))
    assert "next" in added
    assert "thoughts" not in added
    assert "<|im_end|>" not in added.split("next")[0]


def test_a_rendered_reply_parses_back(renderer):
    messages = [user("question")]
    tokens = renderer.render_reply(messages, assistant("the answer"))
    assert tokens[-1] == END
    assert tokens.count(END) == 1
    assert renderer.parse_reply(tokens)["content"].endswith("the answer")
    assert renderer.parse_reply(tokens[:-1])["content"] == renderer.parse_reply(tokens)["content"]


def test_equal_prompts_are_rendered_once_and_their_tokens_belong_to_the_caller(monkeypatch):
    renderer = Renderer(tiny_tokenizer())
    messages = [user("2 + 2?")]
    tokens = renderer.render_prompt(messages)
    expected = [*tokens]
    tokens.append(END)
    render, rendered = renderer.chat.apply, []
    monkeypatch.setattr(renderer.chat, "apply", lambda *values: rendered.append(values) or render(*values))
    assert renderer.render_prompt([user("2 + 2?")]) == expected
    assert not rendered
    messages[0]["content"] = "3 + 3?"
    assert renderer.decode(renderer.render_prompt(messages)) == renderer.decode(expected).replace("2", "3")
    assert rendered


def test_stop_tokens_are_the_end_of_turn_and_the_end_of_text():
    assert Renderer(tiny_tokenizer()).stop_token_ids == (END,)
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    renderer = Renderer(tokenizer)
    assert renderer.stop_token_ids == (END, vocab_id("<|endoftext|>"))
    prompt = renderer.render_prompt([user("q")])
    by_eos = renderer.render_next([*prompt, vocab_id("<|endoftext|>")], [user("n")])
    assert by_eos == renderer.render_next([*prompt, END], [user("n")])
    assert renderer.parse_reply([65, END, vocab_id("<|endoftext|>")])["content"] == renderer.decode([65])


def test_special_tokens_inside_a_reply_stay_visible():
    renderer = Renderer(tiny_tokenizer())
    tokens = renderer.tokenizer.encode("a<|im_start|>b<|im_end|>", add_special_tokens=False)
    assert renderer.parse_reply(tokens) == assistant("a<|im_start|>b")


def test_tools_and_arguments_reach_the_template():
    template = "{% if tools %}{{ tools[0].name }} {% endif %}{{ mood }} " + CHAT_TEMPLATE
    renderer = Renderer(tiny_tokenizer(), template, {"mood": "calm"})
    assert renderer.decode(renderer.render_prompt([user("q")], tools=[{"name": "sum"}])).startswith("sum calm ")


def test_a_tokenizer_without_a_template_is_refused_with_a_way_out():
    with pytest.raises(ConfigError, match="'plain'"):
        Renderer(tiny_tokenizer(chat_template=None))
    assert Renderer(tiny_tokenizer(chat_template=None), "plain").stop_token_ids == (END,)
    tokenizer = tiny_tokenizer(chat_template=None)
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="eos"):
        Renderer(tokenizer, "plain")


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ messages | length }}" + CHAT_TEMPLATE, "differently once it was answered"),
        ("{% for m in messages %}{{ m.content }}{% if loop.last %}!{% endif %}{% endfor %}", "differently"),
        ("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}", "0 times"),
        (CHAT_TEMPLATE + "{{ messages[-1].content }}", "differently|times"),
    ],
)
def test_templates_that_cannot_be_appended_to_are_refused(template, says):
    with pytest.raises(ConfigError, match=says):
        Renderer(tiny_tokenizer(), template)


def test_messages_the_template_refuses_are_a_data_error():
    renderer = Renderer(tiny_tokenizer(), BRACKETS)
    with pytest.raises(DataError, match="roles must alternate"):
        renderer.render_prompt([{"role": "tool", "content": "x"}])


def test_half_a_character_is_refused_with_the_text_before_it() -> None:
    renderer = Renderer(tiny_tokenizer(), "plain")
    for text in ("caf\udce9 au lait", "x" * 5000 + "caf\udce9"):
        with pytest.raises(DataError, match=r"half a character, '\\udce9' after '.*caf', .*errors='replace'"):
            renderer.render_prompt([user(text)])
        with pytest.raises(DataError, match="half a character"):
            renderer.longer_than(100, [user(text + "y" * 1000)])


@pytest.mark.parametrize("build", [tiny_tokenizer, bpe_tokenizer, metaspace_tokenizer], ids=["tiny", "bytes", "spaces"])
def test_the_bytes_of_tokens_are_the_bytes_of_the_text(build: Callable[[], Any]) -> None:
    tokenizer = build()
    tokenizer.chat_template = tokenizer.chat_template or INSTRUCT
    renderer, text = Renderer(tokenizer), "write  more, naïve 👍🏽 日本"
    tokens = [*tokenizer(text, add_special_tokens=False).input_ids, *tokenizer.all_special_ids]
    written = b"".join(map(renderer.bytes_of, tokens)).decode()
    assert written.removeprefix(" ") == text + "".join(tokenizer.all_special_tokens)
    assert any("\ufffd" in renderer.text_of(token) for token in tokens)
