"""Two tokenizations of one text share the spans that a search through all cuts finds, down to bytes of an emoji."""

import random
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.other_tokenizers import TEXT, bpe_tokenizer, lowercase_tokenizer, metaspace_tokenizer
from tests.reference import alignment as slow
from tests.tiny import tiny_tokenizer
from whet.base.errors import DataError
from whet.chat.renderer import Renderer
from whet.core.types import Message, Span, Trajectory
from whet.distillation.mixture import span_shares
from whet.distillation.retokenize import retokenize, shared_spans, text_ends

MAKERS = {"bytes": tiny_tokenizer, "bpe": bpe_tokenizer, "metaspace": metaspace_tokenizer}


@cache
def tokenizer(name: str) -> Any:
    return MAKERS[name]()


def decode(name: str) -> Any:
    return lambda tokens: tokenizer(name).decode(list(tokens), skip_special_tokens=False)


def encode(name: str, text: str) -> list[int]:
    return tokenizer(name).encode(text, add_special_tokens=False)


def test_the_tokenizers_of_these_tests_cut_otherwise() -> None:
    text = "write more words 👍🏽"
    cuts = {name: len(encode(name, text)) for name in MAKERS}
    assert len(set(cuts.values())) == 3
    assert [decode(name)(encode(name, text)) for name in MAKERS] == [text] * 3


letters = st.text(st.sampled_from("write letters, é日👍🏽\n ab7"), max_size=30)


@settings(max_examples=60, deadline=None)
@given(letters, st.sampled_from(sorted(MAKERS)), st.sampled_from(sorted(MAKERS)))
def test_shared_spans_are_those_of_a_search_through_all_cuts(text: str, one: str, other: str) -> None:
    ours, theirs = encode(one, text), encode(other, text)
    our_text, our_ends = text_ends(ours, decode(one))
    their_text, their_ends = text_ends(theirs, decode(other))
    assert our_text == their_text == text
    our_spans, their_spans, count = shared_spans(our_ends, their_ends)
    found = [(sum(s <= span for s in our_spans), sum(s <= span for s in their_spans)) for span in range(count)]
    assert found == slow.spans(ours, theirs, decode(one), decode(other))


@pytest.mark.parametrize("name", MAKERS)
def test_a_tokenization_shares_every_token_with_itself_but_for_parts_of_a_character(name: str) -> None:
    tokens = encode(name, "write words é 👍🏽")
    ends = text_ends(tokens, decode(name))[1]
    ours, theirs, count = shared_spans(ends, ends)
    assert ours == theirs
    assert count == len(set(ends))
    assert sorted(set(ours)) == list(range(count))


def test_the_bytes_of_an_emoji_end_where_it_ends() -> None:
    assert text_ends(encode("bytes", "a👍b"), decode("bytes")) == ("a👍b", [1, 2, 2, 2, 2, 3])


def test_bytes_that_are_no_text_still_belong_to_some_span() -> None:
    broken = [*encode("bytes", "a"), *encode("bytes", "👍")[:2], *encode("bytes", "b"), *encode("bytes", "👍")[:3]]
    text, ends = text_ends(broken, decode("bytes"))
    assert text == decode("bytes")(broken)
    assert ends == sorted(ends)
    assert ends[-1] == len(text)
    assert ends[0] == 1


def test_a_decoder_that_writes_tokens_differently_together_gives_one_span() -> None:
    def odd(tokens: Any) -> str:
        return "".join(map(str, tokens)) if len(tokens) < 4 else "something else"

    assert text_ends([1, 2, 3, 4], odd) == ("something else", [14] * 4)


def test_tokens_that_write_nothing_belong_to_the_span_before_them() -> None:
    assert shared_spans([2, 2, 4], [1, 2, 4, 4]) == ([0, 0, 1], [0, 0, 1, 1], 2)
    assert shared_spans([], []) == ([], [], 0)
    assert shared_spans([0, 0], []) == ([0, 0], [], 1)
    assert shared_spans([0, 3], [3]) == ([0, 0], [0], 1)


@pytest.mark.parametrize("seed", range(4))
def test_shares_of_spans_equal_a_loop(seed: int) -> None:
    dice = random.Random(seed)
    our_spans = sorted(dice.randrange(5) for _ in range(12))
    their_spans = sorted(dice.choice(our_spans) for _ in range(7))
    ours, theirs = ([-dice.random() for _ in spans] for spans in (our_spans, their_spans))
    found = span_shares(*(torch.tensor(x) for x in (ours, our_spans, theirs, their_spans)), spans=5)
    assert found.tolist() == pytest.approx(slow.shares(ours, our_spans, theirs, their_spans), abs=1e-6)
    heard = sum(x for x, s in zip(theirs, their_spans, strict=True) if s in our_spans)
    known = sum(x for x, s in zip(ours, our_spans, strict=True) if s in their_spans)
    assert float(found.sum()) == pytest.approx(heard - known, abs=1e-5), "nothing is lost or counted twice"


# Whole conversations


def conversation(closed: bool = True, trained: bool = True) -> tuple[Trajectory, Renderer]:
    """Two turns after a worked example, in the byte tokenizer's ChatML."""
    renderer = Renderer(tokenizer("bytes"))
    messages: list[Message] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "what is 1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "write words"},
    ]
    prompt = renderer.render_prompt(messages)
    first = [*encode("bytes", "more words 👍🏽"), renderer.end_of_turn]
    more: list[Message] = [{"role": "user", "content": "and letters"}]
    following = renderer.render_next(prompt + first, more)
    second = [*encode("bytes", "letters"), *([renderer.end_of_turn] if closed else [])]
    said: list[Message] = [{"role": "assistant", "content": text} for text in ("more words 👍🏽", "letters")]
    spans = [Span(prompt, False), Span(first, trained), Span(following, False), Span(second, True)]
    return Trajectory(spans, messages=[*messages, said[0], *more, said[1]]), renderer


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_a_conversation_is_retold_in_the_teachers_own_form(closed: bool, first: bool) -> None:
    trajectory, _ = conversation(closed, first)
    teacher = Renderer(tokenizer("bpe"))
    made = retokenize(trajectory, tokenizer("bytes"), teacher, "g")
    text = teacher.decode(made.trajectory.tokens)
    assert text == (
        "[SYS]Be brief.[/SYS][INST] what is 1 + 1? [/INST]2</s>[INST] write words [/INST]more words 👍🏽</s>"
        "[INST] and letters [/INST]letters" + "</s>" * closed
    )
    assert [span.trained for span in made.trajectory.spans] == [False, first, False, True]
    own = [token for span in trajectory.spans if span.trained for token in span.tokens]
    theirs = [token for span in made.trajectory.spans if span.trained for token in span.tokens]
    assert (len(made.ours), len(made.theirs)) == (len(own), len(theirs))
    assert set(made.ours) == set(made.theirs) == set(range(made.spans))
    for span in range(made.spans):
        mine = decode("bytes")([t for t, s in zip(own, made.ours, strict=True) if s == span])
        other = decode("bpe")([t for t, s in zip(theirs, made.theirs, strict=True) if s == span])
        assert mine == other or (mine, other) == ("<|im_end|>", "</s>")
    assert made.unlike == 0


def test_a_conversation_without_worked_examples_is_retold() -> None:
    renderer = Renderer(tokenizer("bytes"))
    messages: list[Message] = [{"role": "user", "content": "write words"}]
    spans = [Span(renderer.render_prompt(messages), False), Span(encode("bytes", "words , é"), True)]
    trajectory = Trajectory(spans, messages=[*messages, {"role": "assistant", "content": "words , é"}])
    made = retokenize(trajectory, tokenizer("bytes"), Renderer(tokenizer("bpe")), "g")
    assert decode("bpe")(made.trajectory.tokens) == "[INST] write words [/INST]words , é"


def test_an_end_token_that_was_chosen_later_ends_a_reply() -> None:
    trajectory, _ = conversation()
    ours = tiny_tokenizer()
    ours.eos_token = "!"
    trajectory.spans[3].tokens = encode("bytes", "letters!")
    made = retokenize(trajectory, ours, Renderer(tokenizer("bpe")), "g")
    assert decode("bpe")(made.trajectory.spans[3].tokens) == "letters</s>"


def test_what_the_other_tokenizer_can_not_write_is_one_span() -> None:
    trajectory, renderer = conversation()
    trajectory.spans[1].tokens = [*encode("bytes", "More Words"), renderer.end_of_turn]
    made = retokenize(trajectory, tokenizer("bytes"), Renderer(lowercase_tokenizer()), "g")
    assert made.unlike == 1
    assert made.ours[:11] == [0] * 10 + [1], "the words, then the end of the turn"
    assert max(made.ours) > 2, "the second reply is cut as usual"


def test_special_tokens_inside_a_reply_are_text_to_the_other_tokenizer() -> None:
    trajectory, renderer = conversation()
    start = tokenizer("bytes").convert_tokens_to_ids("<|im_start|>")
    trajectory.spans[3].tokens = [*encode("bytes", "a"), start, *encode("bytes", "b"), renderer.end_of_turn]
    made = retokenize(trajectory, tokenizer("bytes"), Renderer(tokenizer("bpe")), "g")
    last = made.trajectory.spans[3].tokens
    assert decode("bpe")(last) == "a<|im_start|>b</s>"
    assert len({span for span in made.ours if span >= made.ours[-4]}) == 4
    assert made.theirs.count(made.ours[-3]) > 1, "several of their tokens for our special one"


@pytest.mark.parametrize("tokens", [[], [258], [258, 256]], ids=["nothing", "an end", "two ends"])
def test_an_empty_answer_has_no_text_to_share(tokens: list[int]) -> None:
    trajectory, _ = conversation()
    trajectory.spans[1].tokens = tokens
    made = retokenize(trajectory, tokenizer("bytes"), Renderer(tokenizer("bpe")), "g")
    assert list(made.trajectory.spans[1].tokens) == ([0] if tokens else [])
    assert made.ours[: len(tokens)] == [0] * len(tokens)
    assert set(made.ours) == set(made.theirs) == set(range(made.spans))


def test_a_reply_whose_thoughts_a_budget_ended_is_one_reply_beside_worked_examples() -> None:
    trajectory, _ = conversation()
    first = trajectory.spans[1]
    thought = [Span(encode("bytes", "hm"), True, [-1.0] * 2), Span(encode("bytes", "\n</think>\n\n"), False)]
    trajectory.spans[1:2] = [*thought, Span(first.tokens, True, [-1.0] * len(first.tokens))]
    trajectory.spans[0].tokens = [*trajectory.spans[0].tokens, *encode("bytes", "<think>\n")]
    made = retokenize(trajectory, tokenizer("bytes"), Renderer(tokenizer("bpe")), "g")
    assert [span.trained for span in made.trajectory.spans] == [False, True, False, True, False, True]
    assert decode("bpe")(made.trajectory.tokens).endswith(
        "2</s>[INST] write words [/INST]<think>\nhm\n</think>\n\nmore words 👍🏽</s>"
        "[INST] and letters [/INST]letters</s>"
    )
    trained = [token for span in trajectory.spans if span.trained for token in span.tokens]
    assert len(made.ours) == len(trained)
    assert set(made.ours) == set(made.theirs) == set(range(made.spans))


def test_a_prompt_that_is_learned_from_is_refused_by_name() -> None:
    trajectory, _ = conversation()
    prompt = trajectory.spans[0].tokens
    trajectory.spans[:1] = [Span(prompt[:1], False), Span(prompt[1:], True)]
    with pytest.raises(DataError, match=r"task-7: .*set data.train_on"):
        retokenize(trajectory, tokenizer("bytes"), Renderer(tokenizer("bpe")), "task-7")


def test_what_can_not_be_retold_is_refused_by_name() -> None:
    trajectory, _ = conversation()
    unknown = Trajectory(trajectory.spans, messages=[])
    with pytest.raises(DataError, match=r"task-7: .* needs the messages"):
        retokenize(unknown, tokenizer("bytes"), Renderer(tokenizer("bpe")), "task-7")


def test_the_texts_that_taught_the_tokenizer_come_back() -> None:
    assert [decode("bpe")(encode("bpe", text)) for text in TEXT] == TEXT
