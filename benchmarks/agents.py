"""The cost of episodes of several turns, with and without shared beginnings. Prints one line for each measurement.

    python benchmarks/agents.py [--parts generator,learner,tools,sessions] [--model FOLDER] [--vllm] [--small]
                                [--json FILE]

generator: the 8 episodes of a group, of 8 turns each; the next prompt is the last one, its answer of 32 random tokens
and an observation of 32. Tokens of prompts that were laid out and computed, and seconds, with the beginnings of prompts
shared, and with every prompt computed from its first token. With ``--vllm`` also on vLLM, in the interpreter that it is
installed in.

learner: the same episodes, forward and backward, with their common beginnings shared, and as separate rows.
Then episodes whose history is rewritten, so that each reply is a separate line.

tools: 64 episodes at once, of 4 turns; each reply of 32 tokens is followed by a tool of 0.5 to 8 seconds. Episodes a
minute, and what they waited for, compared with tools that take no time. Every reply calls the tool, regardless of its
text.

sessions: an episode of 300 calls through the endpoint, whose history becomes a summary after each 50; each result has
some 400 tokens. Replies take no time. Processor time for a call, with the client's, and memory that the process holds
more at the end.

Without ``--model`` the model has the shape of SmolLM2-135M and random weights: the time is the same.
"""

import argparse
import asyncio
import json
import random
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch
from machine import add_precision, chosen_dtype, describe, seconds
from refit import Listed
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel

from whet.chat.renderer import Renderer
from whet.core.batch import Batch
from whet.core.types import Distribution, Episode, Group, Message, Span, Task, Trajectory
from whet.endpoint.conversations import Conversations
from whet.endpoint.server import Endpoint
from whet.engines.base import Completion, Engine, PausableEngine, SamplingParams
from whet.engines.torch.config import TorchGeneratorConfig
from whet.engines.torch.generator import TorchGenerator
from whet.engines.torch.loading import build_engine_model
from whet.engines.vllm.config import VllmGeneratorConfig
from whet.fetch.model import fetch_model
from whet.metrics.clock import Timing
from whet.models.attention.forest import forest_hidden, use_forest_attention
from whet.models.head import head_of
from whet.processes.compute import compute_now
from whet.processes.machine import keep_freed_memory
from whet.rollouts.episode import play
from whet.rollouts.failures import Failures
from whet.rollouts.sampling import Sampling
from whet.rollouts.session import Recording
from whet.tasks.base import Environment, Environments, Observation, Step
from whet.tools.tool import tools_of
from whet.tools.toolbox import Toolbox, ToolLimits
from whet.weights.config import WeightSyncConfig
from whet.weights.engine import EngineSync

GROUP, PROMPT = 8, 200
SHAPE = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
SMALL = {"hidden_size": 288, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 49152}
Result = dict[str, float]


def load(folder: str | None, small: bool, precision: str) -> PreTrainedModel:
    """Return the model of a folder, or one with random weights."""
    dtype = chosen_dtype(precision, folder)
    torch.manual_seed(0)
    if folder is not None:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    config = LlamaConfig(**(SMALL if small else SHAPE), **HEADS, max_position_embeddings=8192)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


async def episodes(generator: Engine[Any], shares: bool, turns: int, tokens: int) -> None:
    """Play one group: each episode continues as soon as its own answer arrives. Where nothing is to be shared, the
    prompts differ from the first token on."""
    draw = torch.Generator().manual_seed(1)
    prompt = torch.randint(10, 500, (PROMPT,), generator=draw).tolist()

    async def episode(number: int) -> None:
        history = [prompt[0] if shares else number, *prompt[1:]]
        for turn in range(turns):
            params = SamplingParams(tokens, seed=number * turns + turn)
            completion = await generator.sample(history, params, f"episode {number}")
            observation = torch.randint(10, 500, (tokens,), generator=draw).tolist()
            history += completion.tokens + observation

    await asyncio.gather(*map(episode, range(GROUP)))


async def measure(generator: PausableEngine[Any], shares: bool, turns: int, tokens: int) -> Result:
    """Return the seconds of a group, after a warm-up, and how many of its prompts' tokens were computed."""
    await episodes(generator, shares, 1, 2)
    await generator.pause()
    await generator.resume(1)  # what the warm-up left is forgotten
    generator.tally()
    started, computing = time.perf_counter(), time.process_time()
    await episodes(generator, shares, turns, tokens)
    seconds, computing = time.perf_counter() - started, time.process_time() - computing
    metrics = generator.tally().result()
    laid_out = metrics["time/generator/prompt_tokens"]
    computed = laid_out * (1 - metrics["time/generator/cached_share"])
    times = {"seconds": seconds, "seconds of processors, in this process": computing}
    return times | {"laid out": laid_out, "computed": round(computed), "sampled": GROUP * turns * tokens}


async def on_torch(model: PreTrainedModel, shares: bool, turns: int, tokens: int) -> Result:
    def build() -> TorchGenerator:
        config = TorchGeneratorConfig(max_batch=GROUP, prefix_tokens=65536 if shares else 0)
        return TorchGenerator(config, build_engine_model(model.config, model.state_dict(), model.dtype))

    generator = compute_now(build)
    try:
        return await measure(generator, shares, turns, tokens)
    finally:
        await generator.close()


async def on_vllm(model: PreTrainedModel, shares: bool, turns: int, tokens: int) -> Result:
    dtype: Any = str(model.dtype).removeprefix("torch.")
    config = VllmGeneratorConfig(dtype=dtype, max_batch=GROUP, cache_gib=1.0, prefix_caching=shares)
    generator: Any = config.build(model.config)
    try:
        weights = Listed([(name, tensor) for name, tensor in model.state_dict().items() if name != "lm_head.weight"])
        await EngineSync(WeightSyncConfig(probe=False), []).load(weights, generator, 0)
        return await measure(generator, shares, turns, tokens)
    finally:
        await generator.close()


def generator_part(args: argparse.Namespace) -> dict[str, Result]:
    """Measure shared beginnings and whole prompts, with each engine."""
    model = compute_now(load, args.model, args.small, args.precision)
    turns, tokens = (3, 8) if args.small else (8, 32)
    results: dict[str, Result] = {}
    engines = {"torch": on_torch} | ({"vllm": on_vllm} if args.vllm else {})
    for name, run in engines.items():
        for shares in (True, False):
            label = f"generator, {name}, {'beginnings shared' if shares else 'all computed'}"
            results[label] = asyncio.run(run(model, shares, turns, tokens))
    return results


def drawn(count: int, draw: torch.Generator) -> list[int]:
    tokens: list[int] = torch.randint(10, 500, (count,), generator=draw).tolist()
    return tokens


def played(turns: int, tokens: int, rewritten: bool) -> Group:
    """Return a group of episodes as a run would have recorded them: one line each, or one for each reply, which is
    given the prompt and the last observation."""
    draw = torch.Generator().manual_seed(1)
    prompt, episodes = drawn(PROMPT, draw), []
    for _ in range(GROUP):
        lines = [Trajectory([Span(prompt, False)]) for _ in range(turns if rewritten else 1)]
        for turn in range(turns):
            line = lines[turn if rewritten else 0]
            line.spans += [Span(drawn(tokens if turn else 0, draw), False), Span(drawn(tokens, draw), True)]
        episodes.append(Episode(lines))
    return Group("0", Task("0", []), episodes)


def learner_part(args: argparse.Namespace) -> dict[str, Result]:
    """Forward and backward of a group, shared and row by row."""
    model = compute_now(load, args.model, args.small, args.precision)
    use_forest_attention(model)
    turns, tokens = (3, 8) if args.small else (8, 32)
    results: dict[str, Result] = {}
    for kind, rewritten in (("one line", False), ("a line for each reply", True)):
        group = played(turns, tokens, rewritten)
        laid_out = sum(len(line.tokens) for line in group.trajectories)
        for shares in (True, False):
            batch = Batch.from_groups([group], share_prompts=shares)
            taken = compute_now(seconds, partial(learn, model, batch), 1)
            label = f"learner, {kind}, {'shared' if shares else 'row by row'}"
            results[label] = {"seconds": taken, "laid out": laid_out, "computed": len(batch)}
    return results


def learn(model: PreTrainedModel, batch: Batch) -> None:
    picked = batch.trained.nonzero().squeeze(1)
    hidden = forest_hidden(model, batch)[batch.predictor[picked]]
    logprobs, _ = head_of(model).token_logprobs(hidden, batch.tokens[picked], Distribution())
    (-logprobs.mean()).backward()
    model.zero_grad()


class Slow(Environment):
    """An episode that calls a tool after each reply but the last."""

    def __init__(self, task: Task, turns: int, slow: bool) -> None:
        dice = random.Random(task.uid)
        self.left, self.task = turns, task
        self.waits = [min(8.0, 0.5 * dice.paretovariate(1.2)) if slow else 0.0 for _ in range(turns)]
        self.toolbox = Toolbox(tools_of(self.lookup), ToolLimits(max_calls=turns))

    def lookup(self, entry: int) -> str:
        """Look something up.

        Args:
            entry: The number of the entry
        """
        time.sleep(self.waits[entry])
        return "nothing"

    async def start(self) -> Observation:
        return Observation(self.task.prompt)

    async def step(self, reply: Message) -> Step:
        self.left -= 1
        call: Any = {"id": "1", "type": "function", "function": {"name": "lookup", "arguments": {"entry": self.left}}}
        return Step(done=not self.left, messages=await self.toolbox.answer([call]) if self.left else [])

    async def close(self) -> None:
        """Hold nothing."""


class Stopping:
    """A generator whose replies end where they get too long, as if the model had."""

    def __init__(self, inner: TorchGenerator) -> None:
        self.inner = inner

    async def sample(self, prompt: list[int], params: SamplingParams, session: str) -> Completion:
        return replace(await self.inner.sample(prompt, params, session), finish_reason="stop")


async def with_tools(model: PreTrainedModel, renderer: Renderer, slow: bool, number: int, tokens: int) -> Result:
    """Play ``number`` episodes at once."""
    turns = 4

    class Slows(Environments):
        def make(self, task: Task) -> Environment:
            return Slow(task, turns, slow)

    def build() -> TorchGenerator:
        config = TorchGeneratorConfig(max_batch=number)
        return TorchGenerator(config, build_engine_model(model.config, model.state_dict(), model.dtype))

    generator, timing = compute_now(build), Timing()
    stopping: Any = Stopping(generator)
    sampling = Sampling(max_new_tokens=tokens, max_turns=turns)
    tasks = [Task(str(i), [{"role": "user", "content": f"Question {i}"}]) for i in range(number)]
    started = time.perf_counter()
    try:
        plays = (
            play(
                Slows(),
                t,
                stopping,
                renderer,
                sampling,
                retries=0,
                seed=i,
                session=t.uid,
                timing=timing,
                failures=Failures(),
            )
            for i, t in enumerate(tasks)
        )
        episodes = await asyncio.gather(*plays)
    finally:
        await generator.close()
    passed, lap = time.perf_counter() - started, timing.lap()
    longest = max(sum(Slow(task, turns, slow).waits[1:]) for task in tasks)
    return {
        "episodes a minute": 60 * number / passed, "seconds": passed, "seconds of the slowest episode's tools": longest,
        "share of episodes' time in tools": lap.grading / (lap.grading + lap.generating),
        "share of time in which the engine had work": lap.sampling / passed,
        "replies": sum(episode.usage.turns for episode in episodes),
    }  # fmt: skip


def tools_part(args: argparse.Namespace) -> dict[str, Result]:
    """Measure slow tools, and tools that take no time."""
    renderer = Renderer(AutoTokenizer.from_pretrained(args.model or fetch_model("smollm2-135m-instruct")))
    model = compute_now(load, args.model, args.small, args.precision)
    number, tokens = (8, 8) if args.small else (64, 32)
    return {
        f"{number} episodes, {'slow tools' if slow else 'tools that take no time'}": asyncio.run(
            with_tools(model, renderer, slow, number, tokens)
        )
        for slow in (True, False)
    }


class Instant:
    """A generator that replies at once, always the same."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    async def sample(self, prompt: list[int], params: SamplingParams, session: str) -> Completion:
        return Completion(list(self.tokens), [-0.5] * len(self.tokens), (0, 0), "stop")


async def session(renderer: Renderer, calls: int, every: int, traced: bool) -> Result:
    """Play one episode of an agent that summarises, and measure its memory (``traced``) or its time."""
    engine: Any = Instant([*renderer.encode_text("cat notes.txt " * 8), renderer.stop_token_ids[0]])
    sampling = Sampling(max_turns=calls, max_prompt_tokens=4096, max_episode_tokens=100_000)
    recording = Recording(engine, renderer, sampling, "episode", seed=0)
    endpoint, result = Endpoint(renderer), "the result of a command " * 80
    begin: list[Any] = [{"role": "system", "content": "You work in a shell."}, {"role": "user", "content": "The task."}]
    history = list(begin)
    endpoint.start()
    conversations = Conversations(recording)
    if traced:
        tracemalloc.start()
    started = time.process_time()
    with endpoint.open(conversations) as address:
        headers = {"authorization": f"Bearer {address.api_key}"}
        alone = httpx.Limits(max_keepalive_connections=0)  # a connection for each call
        async with httpx.AsyncClient(base_url=address.base_url, headers=headers, timeout=600, limits=alone) as client:
            for call in range(1, calls + 1):
                answer = await client.post("/chat/completions", json={"model": "m", "messages": history})
                message = answer.raise_for_status().json()["choices"][0]["message"]
                history += [message, {"role": "user", "content": result}]
                if call % every == 0:
                    history = [*begin, {"role": "user", "content": f"a summary of {call} calls"}]
    taken = time.process_time() - started
    if traced:
        memory = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return {"MiB held at the end": memory / 2**20}
    await conversations.close()
    await endpoint.close()
    branches = recording.trajectories
    return {
        "milliseconds of processors for a call": 1000 * taken / calls,
        "branches": len(branches),
        "tokens of the branches": sum(len(branch.tokens) for branch in branches),
        "tokens of all prompts": recording.usage.prompt_tokens,
    }


def sessions_part(args: argparse.Namespace) -> dict[str, Result]:
    """Measure a session with summaries."""
    renderer = Renderer(AutoTokenizer.from_pretrained(args.model or fetch_model("smollm2-135m-instruct")))
    calls, every = (12, 4) if args.small else (300, 50)
    results = [asyncio.run(session(renderer, calls, every, traced)) for traced in (False, True)]
    return {f"sessions, {calls} calls, a summary after each {every}": results[0] | results[1]}


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Result]]] = {
    "generator": generator_part,
    "learner": learner_part,
    "tools": tools_part,
    "sessions": sessions_part,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="some of " + ", ".join(PARTS))
    add_precision(parser)
    parser.add_argument("--model", help="a folder; by default a model with random weights")
    parser.add_argument("--vllm", action="store_true", help="on vLLM, too")
    parser.add_argument("--small", action="store_true", help="a tiny model and short episodes: does it run?")
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    args = parser.parse_args()
    keep_freed_memory()
    results: dict[str, Result] = {}
    for part in args.parts.split(","):
        for label, numbers in PARTS[part](args).items():
            results[label] = numbers
            print(f"{label}: " + ", ".join(f"{name} {value:.6g}" for name, value in numbers.items()), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"machine": describe(), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
