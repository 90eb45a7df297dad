"""A trained model behind an endpoint, for people and programs to talk to."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from pydantic import ValidationError

from whet.base.seeds import derive_seed
from whet.chat.draft import without_beginning
from whet.chat.renderer import Renderer
from whet.endpoint.config import EndpointConfig
from whet.endpoint.conversations import answer_of, check_tools, context_error
from whet.endpoint.request import Answer, ApiError, Question
from whet.endpoint.server import Endpoint
from whet.engines.base import Engine
from whet.rollouts.sampling import Sampling
from whet.rollouts.session import PromptTooLong, Recording, Session
from whet.rollouts.watched import Watch
from whet.run.build import open_generator
from whet.tasks.base import Address

if TYPE_CHECKING:
    from whet.run.recipe import Recipe

_REPLY = 1024  # the most tokens of a reply if the call sets no limit


class ServedModel:
    """Answers each call separately, with the sampling that the call asks for, by default at temperature 1."""

    def __init__(self, generator: Engine[object], renderer: Renderer, context: int, seed: int) -> None:
        self.generator, self.renderer, self.longest, self.seed = generator, renderer, context, seed
        self.calls = 0

    async def answer(self, question: Question, repeated: bool, watch: Watch | None = None) -> Answer:
        """See ``Responder``."""
        self.calls += 1
        requested = question.sampling.seed
        seed = derive_seed(self.seed, "serve", self.calls) if requested is None else requested
        sampling = _sampling(question, self.longest)
        recording = Recording(self.generator, self.renderer, sampling, f"call {self.calls}", abs(seed))
        check_tools(self.renderer, question.tools)
        stops = question.sampling.stop
        if watch is not None and stops:
            watch = _watch_before(stops, watch)
        try:
            reply = await Session(recording).reply(question.messages, question.tools, watch=watch)
        except PromptTooLong:
            what = f"the conversation leaves no room for a reply in the context of {self.longest} tokens"
            raise context_error(what) from None
        message = reply.message
        for name in ("content", "reasoning_content"):
            if isinstance(text := message.get(name), str):
                message[name] = _before(stops, text)
        return answer_of(reply, call_ids=_drawn_ids())


def _before(stops: Sequence[str], text: str) -> str:
    """Return the text before the first of the texts that end a reply, which OpenAI's API doesn't send."""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]


def _watch_before(stops: Sequence[str], watch: Watch) -> Watch:
    """Return a watch of replies without the texts that end them, nor what may be the beginning of one."""

    def seen(prompt: int, thought: str, text: str) -> None:
        watch(prompt, *(without_beginning(_before(stops, each), stops) for each in (thought, text)))

    return seen


def _drawn_ids() -> Iterator[str]:
    """Yield ids of tool calls that no other reply has, because the server keeps no conversation to count them in."""
    while True:
        yield uuid4().hex[:9]


def _sampling(question: Question, context: int) -> Sampling:
    asked = question.sampling
    named = ("temperature", "top_p", "top_k", "min_p", "thinking")
    given = {name: value for name, value in asdict(asked).items() if name in named and value is not None}
    if given.get("top_k") == -1:
        given["top_k"] = 0  # vLLM's way to say: all
    limits = {"max_prompt_tokens": context - 1, "max_episode_tokens": context}
    longest = question.limit or _REPLY
    try:
        return Sampling.model_validate({**given, **limits, "max_new_tokens": longest, "stop": asked.stop})
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise ApiError(400, f"{name}: {first['msg']}", param=name) from None


async def serve(
    recipe: "Recipe",
    run: Path | None,
    *,
    name: str,
    host: str,
    port: int,
    token: str | None,
    ready: Callable[[Address], None],
) -> None:
    """Serve the recipe's model, with the weights of a run's best checkpoint if there is one, under a ``name`` until it
    is cancelled. ``ready`` is called with the address."""
    async with open_generator(recipe, run) as (generator, renderer):
        endpoint = Endpoint(renderer, EndpointConfig(host=host, port=port, calls=None), model=name)
        endpoint.start()
        try:
            served = ServedModel(generator, renderer, recipe.generator.max_context, recipe.seed)
            with endpoint.open(served, token) as address:
                ready(address)
                await endpoint.until_closed()
        finally:
            await endpoint.close()
