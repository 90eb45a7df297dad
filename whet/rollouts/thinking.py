"""Control of thinking at sampling time: on, off, or ended at a budget. Text that is inserted for the model is never
trained, so a reply whose thoughts were ended has three spans: the thoughts, ``</think>``, and the answer.

The tags are plain text, so this also works with chat templates that don't write thoughts.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from whet.base.seeds import derive_seed
from whet.chat.renderer import Renderer
from whet.chat.thinking import CLOSE, OPEN, is_open
from whet.core.expert_ids import encode
from whet.core.types import Span
from whet.engines.base import Completion, SamplingParams
from whet.rollouts.sampling import Sampling

_TAIL = 16  # number of tokens before a reply in which a chat template may open thoughts

Sample = Callable[[list[int], SamplingParams], Awaitable[Completion]]


def opening(history: Sequence[int], renderer: Renderer, sampling: Sampling) -> list[int]:
    """Return the tokens to insert before the reply, after ``history``: none if the chat template has written them.
    Raises ``ConfigError`` for a template whose thoughts have other tags."""
    if sampling.controls_thinking:
        renderer.check_thinking()
    if sampling.thinking is None:
        return []
    opened = is_open(renderer.decode(history[-_TAIL:]))
    if sampling.thinking == "on":
        return [] if opened else renderer.encode_text(f"{OPEN}\n")
    text = "" if opened else f"{OPEN}\n"
    closed = renderer.decode(history[-_TAIL:]).rstrip().endswith(CLOSE)
    return [] if closed else renderer.encode_text(f"{text}\n{CLOSE}\n\n")


async def sample_reply(
    sample: Sample, history: list[int], params: SamplingParams, renderer: Renderer, budget: int | None
) -> tuple[list[Span], Completion]:
    """Sample a reply, ending its thoughts after ``budget`` tokens. Return its spans, one of them untrained if the
    budget ended the thoughts, and the whole reply as one completion."""
    if budget is None or budget >= params.max_new_tokens:
        completion = await sample(history, params)
        return [_sampled(completion)], completion
    thoughts = await sample(history, replace(params, max_new_tokens=budget))
    spans = [_sampled(thoughts)]
    if thoughts.finish_reason != "length":
        return spans, thoughts
    if is_open(renderer.decode([*history[-_TAIL:], *thoughts.tokens])):
        spans.append(Span(renderer.encode_text(f"\n{CLOSE}\n\n"), False))
    sampled = [token for span in spans for token in span.tokens]
    room = params.max_new_tokens - len(sampled)
    if room < 1:
        return spans[:1], thoughts
    seed = derive_seed(params.seed, "answer")
    answer = await sample([*history, *sampled], replace(params, max_new_tokens=room, seed=seed))
    if len(spans) == 1:
        answer = _stopped(thoughts.tokens, answer, params.stop, renderer)
    spans.append(_sampled(answer))
    versions = [span.versions for span in spans if span.versions]
    whole = replace(
        answer,
        tokens=[*sampled, *answer.tokens],
        logprobs=[value for span in spans for value in span.logprobs or [0.0] * len(span.tokens)],
        versions=(min(first for first, _ in versions), max(last for _, last in versions)),
    )
    return spans, whole


def _stopped(before: list[int], answer: Completion, stops: Sequence[str], renderer: Renderer) -> Completion:
    """Return the answer, which continues ``before`` where it was cut, up to the end of a stop string that begins in
    ``before``."""
    longest = max(map(len, stops), default=0)
    tail = before[-longest:]
    for count in range(1, min(longest, len(answer.tokens))):
        text = renderer.decode([*tail, *answer.tokens[:count]])
        if any(stop in text for stop in stops):
            left_out = len(answer.tokens) - count
            experts = None if answer.experts is None else answer.experts[: len(answer.experts) - left_out]
            tokens, logprobs = answer.tokens[:count], answer.logprobs[:count]
            return replace(answer, tokens=tokens, logprobs=logprobs, finish_reason="stop", experts=experts)
    return answer


def _sampled(completion: Completion) -> Span:
    span = Span(completion.tokens, True, completion.logprobs, completion.versions)
    if completion.experts is not None:
        span.experts = encode(completion.experts[len(completion.experts) - len(span.tokens) :])
    return span
