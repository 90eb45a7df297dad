"""One episode: an environment and the model take turns until the environment is done or a budget is used up.
Independent of groups, permits and the learner."""

import asyncio
import logging
import random
import reprlib
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from whet.base.errors import CallError, DataError, WhetError
from whet.base.seeds import derive_seed
from whet.chat.renderer import Renderer
from whet.core.roles import problem_of
from whet.core.types import Episode, Message, Status, Task
from whet.endpoint.conversations import Conversations
from whet.engines.base import Engine
from whet.metrics.clock import Timing
from whet.processes.loop_thread import format_error
from whet.rollouts.failures import Failures, is_mistake
from whet.rollouts.sampling import Sampling
from whet.rollouts.session import NO_CAST, Cast, LimitReached, Recording, Session
from whet.tasks.base import Environment, Environments, Program, Step, checked_score
from whet.tasks.listing import is_message

if TYPE_CHECKING:
    from whet.endpoint.server import Endpoint

log = logging.getLogger(__name__)


async def play(
    environments: Environments,
    task: Task,
    generator: Engine[object],
    renderer: Renderer,
    sampling: Sampling,
    *,
    retries: int,
    retry_delay: float = 0.0,
    deadline: float | None = None,
    seed: int,
    session: str,
    timing: Timing,
    failures: Failures,
    endpoint: "Endpoint | None" = None,
    record: type[Recording] = Recording,
    cast: Cast = NO_CAST,
) -> Episode:
    """Play an episode with ``run_episode``, or with ``run_program`` through the endpoint. ``cast`` has the players of
    roles that other models play. After an infrastructure failure it is played again from the start, with the same seed.
    An attempt that takes longer than ``deadline`` seconds is such a failure; a mistake in the environment's code is
    not. If the last attempt fails, return an episode without tokens whose status is failed. Errors of the run itself
    are raised."""
    reason = ""
    for attempt in range(retries + 1):
        recording = record(generator, renderer, sampling, session, seed, timing, cast=cast)
        limit = asyncio.timeout(deadline)
        try:
            async with limit:
                program = environments.program_for(task)
                if program is not None and endpoint is not None:
                    episode = await run_program(program, recording, endpoint)
                else:
                    episode = await run_episode(environments.make(task), recording)
            failures.completed += 1
            return episode
        except Exception as error:
            bad_task = isinstance(error, DataError)  # a retry would not help, but other tasks may be valid
            if isinstance(error, WhetError) and not isinstance(error, DataError | CallError):
                raise
            reason, last = format_error(error), bad_task or is_mistake(error) or attempt == retries
            if limit.expired():
                reason = f"it took longer than rollouts.episode_deadline = {deadline:g} s"
            timing.failures[type(error).__name__] += 1
            timing.lost += sum(branch.trained_tokens for branch in recording.trajectories)
            failures.report(session, attempt + 1, error, reason)
        finally:
            recording.branches.clear()  # they refer to the recording, and such a cycle would keep all tokens
        if last:
            break
        jitter = random.Random(derive_seed(seed, "retry", attempt)).uniform(0.5, 1.5)
        await asyncio.sleep(retry_delay * 2**attempt * jitter)
    return Episode([], status=Status.FAILED, error=reason)


async def run_episode(environment: Environment, recording: Recording) -> Episode:
    """Play one episode to its end. Each role has a separate session. Raises errors of the environment and the
    generator; always closes the environment."""
    sessions, seen = dict[str, Session](), dict[str, list[Message]]()
    rewards, where = dict[str, float](), f"of episode {recording.name}"
    episode = Episode([], usage=recording.usage)
    try:
        observation = await environment.start()
        role, messages = observation.role, observation.messages
        while episode.limit is None:
            if role not in sessions:
                sessions[role], seen[role] = recording.begin(role), []
            seen[role] += _checked(messages, seen[role], where)
            reply = await sessions[role].reply(seen[role], observation.tools)
            seen[role].append(reply.message)
            started = time.perf_counter()
            step = await environment.step({**reply.message})  # a step that hangs is a failure, not a used-up budget
            recording.timing.grading += time.perf_counter() - started
            if step.rewards and step.reward:
                raise DataError(f"a step {where} has both a reward and rewards by role; with roles, give only rewards")
            rewards.setdefault(role, 0.0)  # of a role that the rewards leave out
            for earner, earned in (step.rewards or {role: step.reward}).items():
                reward = checked_score("reward", earned, where)
                rewards[earner] = rewards.get(earner, 0.0) + reward
                if earner in sessions:
                    sessions[earner].earn(reward)
            for name, value in step.scores.items():
                episode.scores[name] = checked_score(name, value, where)
            if reply.completion.finish_reason == "length":
                episode.limit = "reply"
            elif step.done:
                break
            role, messages = role if step.role is None else step.role, step.messages
    except LimitReached as reached:
        episode.limit = reached.limit
    finally:
        await environment.close()
    episode.branches = recording.trajectories
    episode.reward = sum(rewards.values()) / max(len(rewards), 1)
    episode.rewards = rewards if set(rewards) - {""} else {}
    episode.status = Status.COMPLETED if episode.limit is None else Status.TRUNCATED
    return episode


def _checked(messages: Sequence[Message], seen: Sequence[Message], where: str) -> Sequence[Message]:
    """Return the messages that an environment gives the model after what it has ``seen``. Raises ``DataError`` if there
    are none, or they are repeated, and for a mistyped role or a value that can't be recorded."""
    if isinstance(messages, str) or not all(isinstance(message, Mapping) for message in messages):
        raise DataError(f"the environment {where} must give a list of messages, not {reprlib.repr(messages)}")
    if not messages:
        raise DataError(
            f"the environment {where} gives the model no message to reply to: start returns Observation(messages), and "
            "a step returns further messages or done=True"
        )
    if wrong := [message for message in messages if not is_message(message)]:
        raise DataError(
            f"a message that the environment {where} gives the model must have a 'role' and a 'content' that is a text "
            f"or a list of parts, unlike {reprlib.repr(wrong[0])}"
        )
    if problem := next(filter(None, map(problem_of, messages)), None):
        raise DataError(f"a message that the environment {where} gives the model {problem}")
    asked, new = _asked(seen), _asked(messages)
    again = bool(asked) and new[: len(asked)] == asked and len(messages) > len(asked)
    if seen and (again or _said(messages[0]) == _said(seen[-1])):
        what = "the conversation" if again else "the model's reply"
        raise DataError(
            f"a step of the environment {where} returns {what} again, which the model has seen: return only the new "
            "messages"
        )
    return messages


def _asked(messages: Sequence[Message]) -> list[tuple[str, object]]:
    """Return the messages without replies, which an environment that repeats the conversation may leave out."""
    return [_said(message) for message in messages if message["role"] != "assistant"]


def _said(message: Message) -> tuple[str, object]:
    return message["role"], message["content"]


async def run_program(program: Program, recording: Recording, endpoint: "Endpoint") -> Episode:
    """Run a program that does its task with the model behind the endpoint. Raises errors of the generator, even if the
    program catches them, and errors of the program, except one caused by the refusal of a call after a budget was used
    up; in that case the reward is 0."""
    where, conversations = f"of episode {recording.name}", Conversations(recording, endpoint.ignored)
    step = Step()
    endpoint.start()
    try:
        with endpoint.open(conversations) as address:
            async with recording.clock():
                step = await conversations.unless_it_repeats(program.run(address))
    except LimitReached as reached:
        conversations.limit = reached.limit
    except Exception as error:
        if conversations.failure is not None:
            raise conversations.failure from error
        if not conversations.refused(error, endpoint.url):
            raise
        log.info("episode %s ended at its budget (%s): %s", recording.name, conversations.limit, format_error(error))
    finally:
        await conversations.close()
        await program.close()
    if conversations.failure is not None:
        raise conversations.failure
    episode = Episode(recording.trajectories, usage=recording.usage, limit=conversations.limit)
    if not episode.branches and episode.limit is None:
        raise DataError(f"{recording.name}: the program ended without calling the model at its base_url")
    episode.reward = checked_score("reward", step.reward, where)
    episode.scores = {name: checked_score(name, value, where) for name, value in step.scores.items()}
    episode.status = Status.COMPLETED if episode.limit is None else Status.TRUNCATED
    return episode
