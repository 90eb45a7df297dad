"""Episodes played with given replies, without a model."""

from collections.abc import Sequence

from whet.core.types import Message
from whet.tasks.base import Environment, Observation, Step
from whet.tasks.cases import Answer


async def play(environment: Environment, answer: Answer) -> tuple[Observation, Step]:
    """Give an environment the replies of ``answer`` until the episode is done, and close it.

    Returns what the model is shown first, and the whole episode as one step: rewards are added up, later scores replace
    earlier ones, and ``messages`` is the conversation after the first messages.
    """
    replies: Sequence[Message] = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    episode = Step(done=False)
    try:
        observation = await environment.start()
        for reply in replies:
            step = await environment.step(reply)
            episode.reward += step.reward
            episode.scores |= step.scores
            episode.messages += [reply, *step.messages]
            episode.done = step.done
            if step.done:
                break
    finally:
        await environment.close()
    return observation, episode
