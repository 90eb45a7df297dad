"""A rollout of several turns is displayed turn by turn."""

from rich.console import Console

from whet.metrics.rollout_file import RolloutRecord, Turn
from whet.show.transcript import task_data, transcript
from whet.show.view import ending, number, render

TEXTS = ["add", "(1,2)", "3", "."]


def agent(branch: int = 0, turns: int = 2) -> RolloutRecord:
    replies = [Turn(2, 0.5, (3, 4)), Turn(2, 0.0, (4, 4))][:turns]
    messages = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": "add(1,2)"},
        {"role": "tool", "name": "add", "content": "3"},
        {"role": "assistant", "content": "3."},
    ]
    texts = TEXTS if turns == 2 else TEXTS[2:]
    return RolloutRecord(
        1, sample=5, branch=branch, prompt="1 + 2?", answer="".join(texts), messages=messages, turns=replies,
        status="truncated", limit="turns", tokens=list(range(len(texts))), texts=texts, logprobs=[-1.0] * len(texts),
    )  # fmt: skip


def test_each_reply_stands_by_itself_with_its_reward_and_weights() -> None:
    parts = list(transcript(agent()))
    assert [part.label for part in parts] == ["user", "assistant", "tool add", "assistant"]
    assert [part.tokens for part in parts] == [None, range(2), None, range(2, 4)]
    assert [part.facts for part in parts if part.tokens] == ["reward 0.5   weights 3 to 4", "weights 4"]
    assert parts[2].text == "3"


def test_contents_in_parts_are_shown_as_text() -> None:
    record = agent()
    record.messages[0]["content"] = [{"type": "text", "text": "1 + "}, {"type": "text", "text": "2?"}]
    record.data = {"question": "1 + 2?", "answer": "three"}
    assert [part.text for part in transcript(record)] == ["1 + 2?", "add(1,2)", "3", "3."]
    assert task_data(record) == [("answer", "three")]
    console = Console(width=100)
    with console.capture() as shown:
        console.print(render(record))
    assert "1 + 2?" in shown.get()


def test_what_a_branch_took_over_is_context() -> None:
    parts = list(transcript(agent(branch=1, turns=1)))
    assert [part.tokens for part in parts] == [None, None, None, range(2)]


def test_what_stands_before_the_question_is_folded() -> None:
    record = agent(turns=1)
    before = [("system", "Calculate."), ("user", "2 + 2?"), ("assistant", "4"), ("user", "1 + 2?"), ("assistant", "3.")]
    record.messages = [{"role": role, "content": content} for role, content in before]
    record.data = {"answer": "3", "question": "1 + 2?"}
    parts = list(transcript(record))
    assert [(part.label, part.folded) for part in parts] == [
        ("system", True), ("user", True), ("assistant", True), ("user", False), ("assistant", False),
    ]  # fmt: skip
    assert parts[-1].tokens == range(2)
    assert task_data(record) == [("answer", "3")]
    console = Console(record=True, width=80)
    console.print(render(record))
    text = console.export_text()
    assert "3 earlier messages, 17 characters" in text
    assert "task data  answer: 3" in text
    assert "Calculate" not in text


def test_a_record_without_its_replies_is_a_prompt_and_an_answer() -> None:
    record = agent(turns=1)
    record.turns = []
    assert [part.label for part in transcript(record)] == ["prompt", "answer"]


def test_an_episode_without_a_reply_shows_what_was_asked() -> None:
    record = RolloutRecord(1, messages=[{"role": "user", "content": "1 + 2?"}], status="failed", error="gone")
    assert [(part.label, part.text) for part in transcript(record)] == [("user", "1 + 2?")]


def test_the_terminal_shows_all_of_it() -> None:
    console = Console(record=True, width=80)
    console.print(render(agent(branch=1)))
    text = console.export_text()
    assert "#5.1" in text
    assert "truncated (turns)" in text
    places = [text.index(said) for said in ("1 + 2?", "add(1,2)", "tool add", "3.")]
    assert places == sorted(places)
    assert (number(agent()), ending(agent())) == ("#5", "truncated (turns)")
