"""One episode: an environment and a generator take turns until the environment is done. Tokens are only ever appended;
nothing that was sampled is decoded and encoded again. Knows no groups, no permits and no learner."""

import logging
import time
from typing import Annotated, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from whet.config import Config
from whet.data.renderer import Renderer
from whet.environments.base import Environment, Environments, checked_score
from whet.errors import DataError, WhetError
from whet.generators.base import Generator, SamplingParams
from whet.metrics.clock import Timing
from whet.processes.loop_thread import described
from whet.rollouts.observation import shorten
from whet.seeds import derive_seed
from whet.types import Distribution, Message, Span, Status, Task, Trajectory

log = logging.getLogger(__name__)


def _usable(temperature: float) -> float:
    """Logits are divided by it, in single precision."""
    if temperature and not 1e-3 <= temperature <= 1e3:
        raise ValueError(f"expected 0 (the most likely token) or a number from 0.001 to 1000, got {temperature}")
    return temperature


Temperature = Annotated[float, Field(ge=0), AfterValidator(_usable)]


class Sampling(Config):
    """How answers are sampled."""

    temperature: Temperature = 1.0
    """0 takes the most likely token each time."""
    top_k: int = Field(0, ge=0)
    """Sample among the k most likely tokens; 0: all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample among the most likely tokens that hold this much probability."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Leave out tokens less likely than this share of the most likely one."""
    max_new_tokens: int = Field(256, gt=0)
    """Longest reply of one turn, in tokens."""
    max_turns: int = Field(1, gt=0)
    """Longest episode, in replies."""
    max_prompt_tokens: int = Field(2048, gt=0)
    """A task with a longer prompt is an error."""
    max_observation_tokens: int = Field(1024, gt=0)
    """Longest that an environment says between two replies; of what is longer, the middle is left out."""
    max_episode_tokens: int | None = Field(None, gt=1)
    """Longest episode, with its prompt: what gets longer is truncated. By default all that the turns can add up to."""
    stop: tuple[Annotated[str, StringConstraints(min_length=1)], ...] = ()
    """Texts that end a reply."""

    @model_validator(mode="after")
    def _leaves_room_for_a_reply(self) -> Self:
        if self.max_episode_tokens is not None and self.max_episode_tokens <= self.max_prompt_tokens:
            raise ValueError(
                f"max_episode_tokens = {self.max_episode_tokens} leaves no room for a reply after "
                f"max_prompt_tokens = {self.max_prompt_tokens}"
            )
        return self

    @property
    def longest(self) -> int:
        """Most tokens of an episode: its prompt, its replies and what is said between them."""
        between = (self.max_turns - 1) * self.max_observation_tokens
        tokens = self.max_prompt_tokens + self.max_turns * self.max_new_tokens + between
        return tokens if self.max_episode_tokens is None else min(tokens, self.max_episode_tokens)

    @property
    def distribution(self) -> Distribution:
        """What the learner's log-probs are taken under; greedy sampling has none, so temperature 1."""
        return (
            Distribution(self.temperature, self.top_k, self.top_p, self.min_p) if self.temperature else Distribution()
        )

    def params(self, seed: int, stop_token_ids: tuple[int, ...], tokens: int) -> SamplingParams:
        """What the generator is asked for, after ``tokens`` of the episode."""
        return SamplingParams(
            max_new_tokens=min(self.max_new_tokens, self.longest - tokens),
            seed=seed,
            distribution=self.distribution,
            greedy=self.temperature == 0,
            stop_token_ids=stop_token_ids,
            stop=self.stop,
        )


async def play(
    environments: Environments,
    task: Task,
    generator: Generator,
    renderer: Renderer,
    sampling: Sampling,
    *,
    retries: int,
    seed: int,
    session: str,
    timing: Timing,
) -> Trajectory:
    """``run_episode``, again from the start (under the same seed) after an infrastructure failure. When it fails for
    good, a trajectory without tokens whose status is failed; what is wrong with the run itself is raised."""
    why = ""
    for attempt in range(retries + 1):
        try:
            environment = environments.make(task)
            return await run_episode(
                environment, generator, renderer, sampling, seed=seed, session=session, timing=timing
            )
        except Exception as error:
            bad_task = isinstance(error, DataError)  # trying again would not help, and the others may be good
            if isinstance(error, WhetError) and not bad_task:
                raise
            why, last = described(error), bad_task or attempt == retries
        timing.failures += 1
        log.warning("episode %s failed (attempt %d): %s", session, attempt + 1, why)
        if last:
            break
    return Trajectory([], status=Status.FAILED, error=why)


async def run_episode(
    environment: Environment,
    generator: Generator,
    renderer: Renderer,
    sampling: Sampling,
    *,
    seed: int,
    session: str,
    timing: Timing,
) -> Trajectory:
    """Play one episode to its end. Raises what the environment or generator raises; closes the environment always."""
    try:
        observation = await environment.start()
        messages: list[Message] = list(observation.messages)
        prompt = renderer.render_prompt(messages, observation.tools)
        if len(prompt) > sampling.max_prompt_tokens:
            raise DataError(
                f"{session}: the prompt has {len(prompt)} tokens, more than sampling.max_prompt_tokens = "
                f"{sampling.max_prompt_tokens}; raise it or leave the task out"
            )
        history, spans = list(prompt), [Span(prompt, trained=False)]
        trajectory = Trajectory(spans, messages=messages, status=Status.TRUNCATED)
        for turn in range(sampling.max_turns):
            started = time.perf_counter()
            params = sampling.params(derive_seed(seed, turn), renderer.stop_token_ids, len(history))
            completion = await generator.sample(history, params, session)
            sampled = time.perf_counter()
            timing.generating += sampled - started
            spans.append(Span(completion.tokens, True, completion.logprobs, completion.versions))
            history += completion.tokens
            reply = renderer.parse_reply(completion.tokens)
            messages.append(reply)
            step = await environment.step(reply)
            timing.grading += time.perf_counter() - sampled
            where = f"of episode {session}"
            trajectory.reward += checked_score("reward", step.reward, where)
            for name, value in step.scores.items():
                trajectory.scores[name] = checked_score(name, value, where)
            if completion.finish_reason == "length":
                break
            if step.done:
                trajectory.status = Status.COMPLETED
                break
            if turn + 1 < sampling.max_turns:
                added, said = shorten(step.messages, history, renderer, sampling.max_observation_tokens)
                if len(history) + len(added) >= sampling.longest:
                    break
                spans.append(Span(added, trained=False))
                history += added
                messages += said
        return trajectory
    finally:
        await environment.close()
