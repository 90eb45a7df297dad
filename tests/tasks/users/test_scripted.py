"""A user by rules reveals its facts bit by bit, and the bookings at the end decide."""

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from tests.tasks.users.clerk import Clerk
from tests.tiny import tiny_tokenizer
from whet.chat.renderer import Renderer
from whet.core.types import Message, Status, Task
from whet.engines.base import Completion, SamplingParams
from whet.rollouts.episode import run_episode
from whet.rollouts.sampling import Sampling
from whet.rollouts.session import Recording
from whet.tasks.base import Step
from whet.tasks.cases import Answer
from whet.tasks.episodes import play
from whet.tasks.tools.base import solution
from whet.tasks.users.base import Fact, Topic
from whet.tasks.users.booking import BookingDesk, Visit
from whet.tasks.users.desk import Desk
from whet.tasks.users.scripted import ScriptedSpeaker
from whet.tasks.validate import validate, wrong

DESK = BookingDesk(train_size=120, test_size=20)
HARD = BookingDesk(train_size=60, test_size=10, requests=3, forbidden=1.0, corrections=1.0)
TOPICS: list[Topic] = [
    {
        "say": "I would like to move a booking.",
        "facts": [{"words": ["name"], "text": "I am Nia."}, {"words": ["day"], "text": "On Friday."}],
        "correction": {"words": ["day"], "text": "Sorry, on Sunday."},
    },
    {"say": "And cancel the other one.", "facts": []},
]


def heard(*replies: str, topics: list[Topic] = TOPICS) -> list[str | None]:
    """The answers of the user of these topics to the replies."""
    speaker = ScriptedSpeaker(topics)

    async def listen() -> list[str | None]:
        return [await speaker.answer(reply) for reply in replies]

    return asyncio.run(listen())


def played(desk: BookingDesk, task: Task[Visit], replies: Answer) -> Step:
    return asyncio.run(play(desk.open().make(task), replies))[1]


def test_a_user_says_one_fact_after_another_then_corrects_itself_and_ends() -> None:
    assert heard("Sure.", "Thanks.", "Done.", "Done.", "Done.") == [
        "I am Nia.", "On Friday.", "Sorry, on Sunday.", "And cancel the other one.", None,
    ]  # fmt: skip


def test_a_question_gets_the_fact_that_it_asks_for_and_no_other() -> None:
    assert heard("To which day?", "And your NAME?", "Which day was it?") == ["On Friday.", "I am Nia.", "On Friday."]
    assert heard("Your name, and the day?") == ["I am Nia. On Friday."]
    assert heard("The day is fine. Anything?") == ["I am Nia."], "only a question asks"
    assert heard("Yesterday?") == ["I am Nia."], "a part of a word doesn't ask"


def test_a_corrected_fact_replaces_the_first_one() -> None:
    assert heard("Name and day?", "Done.", "Which day, please?")[1:] == ["Sorry, on Sunday.", "Sorry, on Sunday."]


def test_a_fact_of_a_new_topic_replaces_the_old_one_and_other_facts_stay() -> None:
    day, when = ["day", "when"], ["hour", "when"]
    first: list[Fact] = [{"words": day, "text": "Friday."}, {"words": when, "text": "At 8."}]
    topics: list[Topic] = [
        {"say": "One.", "facts": first},
        {"say": "Two.", "facts": [{"words": day, "text": "Sunday."}]},
    ]
    assert heard("When?", "Done.", "When?", topics=topics) == ["Friday. At 8.", "Two.", "At 8. Sunday."]


def test_a_user_confirms_once_for_each_topic() -> None:
    assert heard("Name and day?", "Shall I move it?", "Shall I?")[1:] == ["Yes, please.", "Sorry, on Sunday."]
    assert heard("Name and day?", "Done. Should I do anything else?")[1:] == ["Sorry, on Sunday."]


def test_silence_reveals_nothing() -> None:
    assert set(heard("", " \n", "...", "\u200b", "?")) == {"Hello? Are you still there?"}


def test_right_calls_earn_1_and_cheats_earn_0() -> None:
    for desk in (DESK, HARD, BookingDesk(train_size=40, test_size=5, requests=1)):
        graded = asyncio.run(validate(desk, 60))
        assert wrong(graded) == []
        assert len(graded) > 60
    names = {case.name for case in HARD.cases()}
    assert {"talks until the guest leaves", "does what breaks a rule", "ignores a correction"} <= names


def share(desk: BookingDesk, answer: Callable[[Task[Visit]], Answer]) -> float:
    tasks = desk.tasks("train")
    return sum(played(desk, task, answer(task)).reward for task in tasks) / len(tasks)


def test_a_booking_after_a_cancellation_replaces_no_other_booking() -> None:
    desk = Desk({"B1": {"name": "Nia Ito", "day": "Friday", "hour": 18, "guests": 2}})
    first = desk.book_table("Nia Ito", "Sunday", 19, 2)
    desk.cancel_booking("B1")
    second = desk.book_table("Jun Chen", "Tuesday", 20, 4)
    assert [row["code"] for name in ("Nia Ito", "Jun Chen") for row in desk.find_bookings(name)] == [first, second]


def test_neither_all_that_is_said_nor_nothing_is_right_for_most_guests() -> None:
    def as_said(task: Task[Visit]) -> Answer:
        return solution(*(call for calls in task.data.first_said for call in calls), answer="Done.") * 20

    def canceller(task: Task[Visit]) -> Answer:
        name = re.sub(r"My name is (.*)\.", r"\1", task.data.topics[0]["facts"][0]["text"])
        codes = [row["code"] for row in DESK.state(task).find_bookings(name)]
        return [*solution(*(("cancel_booking", {"code": code}) for code in codes), answer="Done.")] * 20

    talk: list[Message] = [{"role": "assistant", "content": "Of course. What else?"}]
    assert share(DESK, lambda _: talk * 40) == 0
    assert share(HARD, as_said) < 0.1, "only guests who cancel one booking"
    assert share(DESK, as_said) < 0.75
    assert share(DESK, canceller) < 0.2


def test_the_episode_ends_when_the_user_leaves_and_the_bookings_are_scored() -> None:
    patient = BookingDesk(train_size=20, test_size=5, user={"type": "scripted", "max_turns": 2})
    (task,) = [task for task in patient.tasks("train") if len(task.data.topics[0]["facts"]) > 2][:1]
    talk: list[Message] = [{"role": "assistant", "content": "Hm."}] * 9
    episode = played(patient, task, talk)
    assert (episode.done, episode.reward, episode.scores["user_left"], episode.scores["user_turns"]) == (True, 0, 1, 2)
    calls = solution(*(call for calls in task.data.calls for call in calls), answer="Done.")
    episode = played(patient, task, [*calls, *talk])
    assert (episode.reward, episode.scores["user_left"]) == (1, 1)


def test_settings_are_checked() -> None:
    with pytest.raises(ValidationError, match="unknown type 'scriptd'"):
        BookingDesk.model_validate({"user": {"type": "scriptd"}})
    with pytest.raises(ValidationError, match="server"):
        BookingDesk.model_validate({"user": {"type": "model"}})


def serve(desk: BookingDesk, task: Task[Visit]) -> tuple[float, list[Message]]:
    """The reward of a policy by rules, and the conversation."""

    async def episode() -> tuple[float, list[Message]]:
        environments, clerk, talk = desk.open(), Clerk(), list[Message]()
        environment = environments.make(task)
        messages, step = (await environment.start()).messages, Step(done=False)
        for _ in range(60):
            talk += [*messages, reply := clerk.reply(messages[-1])]
            step = await environment.step(reply)
            if step.done:
                break
            messages = step.messages
        await environment.close()
        await environments.close()
        return step.reward, talk

    return asyncio.run(episode())


def test_a_policy_that_sees_only_the_conversation_can_serve_every_guest() -> None:
    for desk in (DESK, HARD):
        for task in desk.tasks("train")[:60]:
            reward, talk = serve(desk, task)
            assert reward == 1, talk


class Engine:
    """An engine whose policy writes prepared texts; it keeps the prompts that it was given."""

    def __init__(self, renderer: Renderer, texts: list[str]) -> None:
        self.renderer, self.texts, self.prompts = renderer, texts, list[str]()

    async def sample(self, prompt: list[int], params: SamplingParams, session: str) -> Completion:
        self.prompts.append(self.renderer.decode(prompt))
        tokens = [*self.renderer.encode_text(self.texts.pop(0)), self.renderer.stop_token_ids[0]]
        return Completion(tokens, [0.0] * len(tokens), (0, 0), "stop")


def test_the_policy_sees_no_fact_before_it_is_said_and_is_trained_on_its_own_replies_alone() -> None:
    renderer = Renderer(tiny_tokenizer(), tools_as_text=True)
    (task,) = [task for task in HARD.tasks("train") if len(task.data.topics) == 2][:1]
    facts = [fact["text"] for topic in task.data.topics for fact in topic["facts"]]
    engine: Any = Engine(renderer, replies := [f"I see {n}." for n in range(30)])
    replies = list(replies)
    sampling = Sampling(max_prompt_tokens=9000, max_new_tokens=32, max_turns=30, max_observation_tokens=400)
    episode = asyncio.run(run_episode(HARD.open().make(task), Recording(engine, renderer, sampling, "e", 0)))
    assert (episode.status, episode.reward) == (Status.COMPLETED, 0.0)
    (branch,) = episode.branches
    trained = [renderer.decode(span.tokens) for span in branch.spans if span.trained]
    assert [text.removesuffix("<|im_end|>") for text in trained] == replies[: len(trained)]
    assert not any(fact in engine.prompts[0] for fact in facts)
    for number, prompt in enumerate(engine.prompts):
        assert len([fact for fact in facts if fact in prompt]) <= number
    assert all(fact in engine.prompts[-1] for fact in facts)
    assert "first_said" not in engine.prompts[-1]
