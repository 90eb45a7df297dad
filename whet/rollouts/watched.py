"""Sampling that is watched: a client sees its reply while it is sampled. What is recorded doesn't depend on it."""

from collections.abc import Callable, Sequence

from whet.chat.draft import Draft
from whet.chat.renderer import Renderer
from whet.engines.base import Completion, Engine, SamplingParams, StreamingEngine, check_completion
from whet.rollouts.sampling import Sampling
from whet.rollouts.thinking import Sample

Watch = Callable[[int, str, str], None]
"""Gets the number of tokens of the prompt, and the thought and the text of the reply so far, which only grow."""


def sampler(engine: Engine[object], session: str) -> Sample:
    """Return the function that samples without being watched."""

    async def sample(history: list[int], params: SamplingParams) -> Completion:
        return check_completion(await engine.sample(history, params, session), history, params, engine)

    return sample


def watched(
    engine: Engine[object],
    session: str,
    renderer: Renderer,
    sampling: Sampling,
    prompt: Sequence[int],
    opened: Sequence[int],
    watch: Watch,
) -> Sample:
    """Return the function that samples one reply, in one or two completions, and calls ``watch`` when more of the reply
    is decided. ``prompt`` ends with ``opened``, the tokens that begin the reply. Without a ``StreamingEngine``,
    ``watch`` is not called."""
    draft = Draft(renderer, sampling.controls_thinking)
    begin = len(prompt) - len(opened)

    def sampled(tokens: list[int]) -> None:
        if draft.add(tokens):
            watch(len(prompt), draft.thought, draft.text)

    async def sample(history: list[int], params: SamplingParams) -> Completion:
        sampled(history[begin + len(draft.tokens) :])  # what begins the reply, or ended its thoughts
        continued = len(history) > len(prompt)  # a stop text may begin before the cut and end the reply after it
        if not isinstance(engine, StreamingEngine) or (continued and params.stop):
            completion = await engine.sample(history, params, session)
        else:
            completion = await engine.stream(history, params, session, sampled)
        return check_completion(completion, history, params, engine)

    return sample
