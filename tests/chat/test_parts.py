"""Contents in parts: the tokens of the joined text, except where a chat template writes parts in its own way."""

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.chat_templates import FAMILIES
from tests.data.test_control_tokens import ORDINARY, RENDERERS, conversation, hostile
from tests.tiny import tiny_tokenizer
from whet.base.errors import DataError
from whet.chat.renderer import Renderer
from whet.core.content import ImagePart, Part, TextPart, content_of, image_urls, text_of, words_of
from whet.core.types import Message

ITERATES = (  # in the manner of vision models: a content is a text or a list of parts
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}SEPARATOR{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
JOINS, LINES = (Renderer(tiny_tokenizer(), ITERATES.replace("SEPARATOR", end)) for end in ("", "\n"))
BUILT = (  # builds its marks from pieces that are texts of the template
    "{% for m in messages %}{{ '<|im_' + 'start' + '|>' }}{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
    "{{ '<|im_' + 'end' + '|>' }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_' + 'start' + '|>' }}assistant\n{% endif %}"
)


def part(text: str) -> TextPart:
    return {"type": "text", "text": text}


def in_parts(message: Message, *cuts: int) -> Message:
    """The message with its text cut at these places."""
    text = text_of(message["content"])
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return message | {"content": [part(text[i:j]) for i, j in pairwise(places)]}


CUTS = st.lists(st.integers(0, 20), max_size=3)


@pytest.mark.parametrize("name", RENDERERS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_splitting_a_text_into_parts_changes_no_token(name: str, data: st.DataObject) -> None:
    renderer = RENDERERS[name]
    texts = data.draw(st.lists(hostile(name) | ORDINARY, min_size=1, max_size=5))
    messages, tools = conversation(*texts, tools=FAMILIES[name].tools)
    cut = [in_parts(message, *data.draw(CUTS)) for message in messages]
    assert renderer.render_prompt(cut, tools) == renderer.render_prompt(messages, tools)
    assert renderer.render_next([], cut[1:2]) == renderer.render_next([], messages[1:2])
    assert renderer.render_reply(cut[:2], cut[2]) == renderer.render_reply(messages[:2], messages[2])


@pytest.mark.parametrize("as_text", [False, True])
@settings(max_examples=30, deadline=None)
@given(texts=st.lists(ORDINARY, min_size=1, max_size=5), cuts=CUTS)
def test_a_template_that_joins_parts_writes_the_tokens_of_the_text(
    as_text: bool, texts: list[str], cuts: list[int]
) -> None:
    renderer = Renderer(tiny_tokenizer(), ITERATES.replace("SEPARATOR", ""), tools_as_text=as_text)
    messages, tools = conversation(*texts, tools=as_text)
    cut = [in_parts(message, *cuts) for message in messages]
    assert renderer.render_prompt(cut, tools) == renderer.render_prompt(messages, tools)


def test_a_template_that_writes_parts_gets_them() -> None:
    asked: list[Message] = [{"role": "user", "content": [part("one"), part("two")]}]
    assert "user\none\ntwo\n<|im_end|>" in LINES.decode(LINES.render_prompt(asked))
    assert "user\none\ntwo\n<|im_end|>" in LINES.decode(LINES.render_next([], asked))
    assert "user\nonetwo<|im_end|>" in JOINS.decode(JOINS.render_prompt(asked))
    replied: list[Message] = [*asked, {"role": "assistant", "content": [part("a"), part("b")]}]
    assert "assistant\nab<|im_end|>" in LINES.decode(LINES.render_whole(replied))  # a reply is always a text


@pytest.mark.parametrize("template", [ITERATES.replace("SEPARATOR", ""), BUILT])
@pytest.mark.parametrize("texts", [["<|im_end|>"], ["<|im_", "end", "|>"], ["<|im_e", "nd|>"], ["<|im_end", "|>"]])
def test_control_tokens_that_are_spelled_over_parts_are_text(template: str, texts: list[str]) -> None:
    renderer = Renderer(tiny_tokenizer(), template)
    tokens = renderer.render_prompt([{"role": "user", "content": [part(text) for text in texts]}])
    assert tokens == renderer.render_prompt([{"role": "user", "content": "<|im_end|>"}])
    assert tokens.count(renderer.tokenizer.convert_tokens_to_ids("<|im_end|>")) == 1


def test_the_text_of_parts_counts_towards_a_length_limit() -> None:
    text = "word " * 400
    for content in (text, [part(text[:900]), part(text[900:])]):
        assert JOINS.longer_than(100, [{"role": "user", "content": content}])
        assert not JOINS.longer_than(4000, [{"role": "user", "content": content}])


def test_an_image_is_refused_in_words() -> None:
    image: Message = {"role": "user", "content": [part("see"), {"type": "image", "url": "cat.png"}]}
    for refuse in (JOINS.render_prompt, RENDERERS["Qwen3"].render_prompt, JOINS.render_whole):
        with pytest.raises(DataError, match=r"^message 2 has an image, where only text can be read; "):
            refuse([{"role": "system", "content": "s"}, image])


@pytest.mark.parametrize("broken", [{"type": "audio"}, {"type": "text"}, {"type": "text", "text": None}, {}, 3, "text"])
def test_other_parts_are_named(broken: Any) -> None:
    with pytest.raises(DataError, match=r"a message has a part of type '.*'; a part must be {'type': 'text'"):
        text_of([broken])


def test_contents_are_read_as_clients_write_them() -> None:
    assert content_of("x") == "x"
    assert content_of([{"type": "input_text", "text": "x"}, {"text": "y"}, {"refusal": "z"}]) == [*map(part, "xyz")]
    for image in ("image", "image_url", "input_image"):
        with pytest.raises(ValueError, match=rf"not a part of type '{image}'"):
            content_of([{"type": image, "text": "alt"}])
    with pytest.raises(ValueError, match="must be a text or a list of parts"):
        content_of(None)
    assert json.loads(json.dumps(content_of([{"text": "é"}]))) == [part("é")]


def test_words_leave_out_images_and_urls_keep_their_order() -> None:
    parts: list[Part] = [
        {"type": "text", "text": "Left: "},
        {"type": "image", "url": "data:image/png;base64,AA=="},
        {"type": "text", "text": "right: "},
        {"type": "image", "url": "data:image/png;base64,AQ=="},
    ]
    assert words_of(parts) == "Left: right: "
    assert image_urls([{"role": "system", "content": "x"}, {"role": "user", "content": parts}]) == [
        "data:image/png;base64,AA==",
        "data:image/png;base64,AQ==",
    ]


def test_a_reader_of_images_reads_parts_of_images_only() -> None:
    def read(part: Mapping[str, object]) -> ImagePart:
        return {"type": "image", "url": str(part["image"])}

    assert content_of([{"type": "image", "image": "a"}, {"type": "text", "text": "b"}], read) == [
        {"type": "image", "url": "a"},
        {"type": "text", "text": "b"},
    ]
    with pytest.raises(ValueError, match="must hold texts and images only, not a part of type 'input_audio'"):
        content_of([{"type": "input_audio"}], read)
