"""One episode: an environment and the model take turns until the environment is done or a budget is used up. Knows no
groups, no permits and no learner."""

import asyncio
import logging
import random
import time
from typing import TYPE_CHECKING

from whet.base.errors import CallError, DataError, WhetError
from whet.base.seeds import derive_seed
from whet.chat.renderer import Renderer
from whet.core.types import Episode, Message, Status, Task
from whet.endpoint.conversations import Conversations
from whet.engines.base import Generator
from whet.metrics.clock import Timing
from whet.processes.loop_thread import described
from whet.rollouts.failures import Failures, is_mistake
from whet.rollouts.sampling import Sampling
from whet.rollouts.session import LimitReached, Recording, Session
from whet.tasks.base import Environment, Environments, Program, Step, checked_score

if TYPE_CHECKING:
    from whet.endpoint.server import Endpoint

log = logging.getLogger(__name__)


async def play(
    environments: Environments,
    task: Task,
    generator: Generator,
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
) -> Episode:
    """``run_episode``, or ``run_program`` through the endpoint, again from the start (under the same seed) after an
    infrastructure failure; to take more than ``deadline`` seconds is one, a mistake in the environment's code is not.
    When it fails for good, an episode without tokens whose status is failed; what is wrong with the run itself is
    raised."""
    why = ""
    for attempt in range(retries + 1):
        recording = Recording(generator, renderer, sampling, session, seed, timing)
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
            bad_task = isinstance(error, DataError)  # trying again would not help, and the others may be good
            if isinstance(error, WhetError) and not isinstance(error, DataError | CallError):
                raise
            why, last = described(error), bad_task or is_mistake(error) or attempt == retries
            if limit.expired():
                why = f"it took longer than rollouts.episode_deadline = {deadline:g} s"
            timing.failures[type(error).__name__] += 1
            timing.lost += sum(line.trained_tokens for line in recording.branches)
            failures.tell(session, attempt + 1, error, why)
        if last:
            break
        jitter = random.Random(derive_seed(seed, "retry", attempt)).uniform(0.5, 1.5)
        await asyncio.sleep(retry_delay * 2**attempt * jitter)
    return Episode([], status=Status.FAILED, error=why)


async def run_episode(environment: Environment, recording: Recording) -> Episode:
    """Play one episode to its end. Raises what the environment or generator raises; closes the environment always."""
    session, where = Session(recording), f"of episode {recording.name}"
    episode = Episode([], usage=recording.usage)
    try:
        observation = await environment.start()
        messages: list[Message] = list(observation.messages)
        while episode.limit is None:
            reply = await session.reply(messages, observation.tools)
            started = time.perf_counter()
            step = await environment.step(reply.message)  # one that hangs is a failure, and no budget that is used up
            recording.timing.grading += time.perf_counter() - started
            reward = checked_score("reward", step.reward, where)
            session.earn(reward)
            episode.reward += reward
            for name, value in step.scores.items():
                episode.scores[name] = checked_score(name, value, where)
            if reply.completion.finish_reason == "length":
                episode.limit = "reply"
            elif step.done:
                break
            messages += [reply.message, *step.messages]
    except LimitReached as reached:
        episode.limit = reached.limit
    finally:
        await environment.close()
    episode.branches = recording.branches
    episode.status = Status.COMPLETED if episode.limit is None else Status.TRUNCATED
    return episode


async def run_program(program: Program, recording: Recording, endpoint: "Endpoint") -> Episode:
    """Let a program do its task with the model behind the endpoint. Raises what the generator raises, whatever the
    program makes of that, and what the program raises, but for the refusal of a call for which no budget was left: then
    its work is worth 0."""
    where, conversations = f"of episode {recording.name}", Conversations(recording)
    step = Step()
    endpoint.start()
    try:
        with endpoint.open(conversations) as address:
            async with recording.clock():
                step = await program.run(address)
    except LimitReached as reached:
        conversations.limit = reached.limit
    except Exception as error:
        if conversations.failure is not None:
            raise conversations.failure from error
        if not conversations.refused(error, endpoint.url):
            raise
        log.info("episode %s ended at its budget (%s): %s", recording.name, conversations.limit, described(error))
    finally:
        await conversations.close()
        await program.close()
    if conversations.failure is not None:
        raise conversations.failure
    episode = Episode(recording.branches, usage=recording.usage, limit=conversations.limit)
    if not episode.branches and episode.limit is None:
        raise DataError(f"{recording.name}: the program ended without a call of the model at its base_url")
    episode.reward = checked_score("reward", step.reward, where)
    episode.scores = {name: checked_score(name, value, where) for name, value in step.scores.items()}
    episode.status = Status.COMPLETED if episode.limit is None else Status.TRUNCATED
    return episode
