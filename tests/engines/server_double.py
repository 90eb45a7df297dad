"""Doubles of vLLM's and SGLang's servers, made from their published sources: the built-in generator behind their HTTP
interfaces, as far as whet uses them.

    python -m tests.engines.server_double vllm MODEL_FOLDER [PORT]

prints its port and serves until it is killed.
"""

import asyncio
import json
import os
import signal
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.forks import PROCESSES
from whet.base.errors import WhetError
from whet.base.listening import listen
from whet.cluster.rendezvous import LOOPBACK, Reservation

Answer = Callable[[dict[str, Any]], Awaitable[Any]]


class Double:
    """A server of one model, whose weights have a label."""

    context = 512
    max_logprobs = 64

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoConfig, AutoTokenizer

        from tests.engines.holding import hold
        from whet.engines.torch.config import TorchGeneratorConfig
        from whet.engines.torch.generator import TorchGenerator
        from whet.engines.torch.loading import build_engine_model
        from whet.models.image_processor import ImageProcessor
        from whet.models.loading import architecture

        facts = AutoConfig.from_pretrained(folder)
        vision = hasattr(facts, "vision_config")
        whole: Any = architecture(vision)
        self.scores = whole.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self.images = ImageProcessor.of(folder, facts) if vision else None
        config = TorchGeneratorConfig(dtype="float32", max_batch=16, max_context=self.context)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        weights = {name: tensor.clone() for name, tensor in self.scores.state_dict().items()}
        model = build_engine_model(facts, weights, torch.float32, vision=vision)
        self.generator = TorchGenerator(config, model, self.tokenizer, images=self.images)
        self.labels = ["default"]  # of the generator's versions
        # While there is a file `held`, no long completion is answered; a file `holds` says that there is one.
        hold(self.generator, (folder / "held").exists, (folder / "holds").touch)
        self.paused = False

    async def sample(
        self, prompt: list[int], settings: dict[str, Any], limit: int, seed: int, images: Sequence[str] = ()
    ) -> Any:
        from whet.core.types import Distribution
        from whet.engines.base import SamplingParams

        temperature = settings["temperature"]
        filters = {name: settings[name] for name in ("top_k", "top_p", "min_p") if name in settings}
        params = SamplingParams(
            max_new_tokens=limit,
            seed=seed,
            distribution=Distribution(temperature=temperature or 1.0, **filters),
            greedy=temperature == 0,
            stop_token_ids=tuple(settings["stop_token_ids"]),
            stop=tuple(settings["stop"]),
            images=tuple(images),
        )
        return await self.generator.sample(prompt, params)

    async def pieces(
        self, prompt: list[int], settings: dict[str, Any], limit: int, seed: int, images: Sequence[str] = ()
    ) -> AsyncIterator[Any]:
        """Yield a completion while it grows: each time it is sampled again to twice the length, to the same tokens."""
        length = 1
        while True:
            done = await self.sample(prompt, settings, min(length, limit), seed, images)
            ended = done.finish_reason != "length" or length >= limit
            yield done, ended
            if ended:
                return
            length *= 2

    def prompt_logprobs(self, tokens: list[int], k: int) -> list[tuple[float, list[tuple[int, float]]]]:
        """Of all tokens but the first, by transformers with the first weights: their log-probs, and the ``k`` most
        likely tokens."""
        import torch

        with torch.no_grad():
            table = self.scores(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        own = table.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
        values, ids = table.topk(k)
        return [
            (logprob, list(zip(*best, strict=True)))
            for logprob, *best in zip(own, ids.tolist(), values.tolist(), strict=True)
        ]

    def check_prompt(self, tokens: list[int], new: int) -> None:
        if len(tokens) + new > self.context or max(tokens) >= self.scores.config.vocab_size:
            raise WhetError("the prompt is too long, or has tokens outside the vocabulary")

    def expanded(self, tokens: list[int], urls: list[str]) -> list[int]:
        """Return a prompt with the tokens of each image in the place of its mark. Raises ``WhetError`` for tokens below
        0, other marks than images, and images whose transparent pixels a server would see as white."""
        from whet.fetch.images import open_image

        if min(tokens) < 0:
            raise WhetError("token_ids must not contain negative values")
        if any(open_image(url).mode != "RGB" for url in urls):
            raise WhetError("an image is not in red, green and blue")
        mark = self.images.mark if self.images else None
        if tokens.count(mark) != len(urls):
            raise WhetError(f"{len(urls)} images, and {tokens.count(mark)} places for them in the prompt")
        left = iter(urls)
        placed = [self.images.tokens(next(left)) if self.images and token == mark else [token] for token in tokens]
        return [token for piece in placed for token in piece]

    async def load(self, folder: str) -> None:
        from safetensors.torch import load_file

        from whet.processes.compute import compute

        def read() -> None:
            opened = self.generator.engine.open()
            for file in sorted(Path(folder).glob("*.safetensors")):
                opened.load(load_file(file).items())
            opened.check_complete()

        await compute(read)

    async def tokenize(self, body: dict[str, Any]) -> Any:
        return {"tokens": self.tokenizer.encode(body["prompt"], add_special_tokens=False)}

    async def rename(self, body: dict[str, Any]) -> Any:
        self.labels.append(body["new_version"])
        return {"success": True}

    async def pause(self, body: dict[str, Any]) -> Any:
        await self.generator.pause()
        self.paused = True
        return {"status": "paused"}

    async def resume(self, body: dict[str, Any]) -> Any:
        if self.paused:
            await self.generator.resume(len(self.labels) - 1)
        self.paused = False
        return {"status": "resumed"}

    async def nothing(self, body: dict[str, Any]) -> Any:
        return {"success": True}


class Vllm(Double):
    def routes(self) -> dict[str, Answer]:
        return {
            "/health": self.nothing,
            "/v1/models": self.models,
            "/tokenize": self.tokenize,
            "/inference/v1/generate": self.generate,
            "/v1/completions": self.completions,
            "/pause": self.pause,
            "/collective_rpc": self.rpc,
            "/update_weight_version": self.rename,
            "/weight_info": self.weight_info,
            "/reset_prefix_cache": self.nothing,  # a resumption clears it
            "/reset_encoder_cache": self.nothing,
            "/resume": self.resume,
        }

    async def models(self, body: dict[str, Any]) -> Any:
        return {"data": [{"id": "tiny", "max_model_len": self.context}]}

    async def weight_info(self, body: dict[str, Any]) -> Any:
        return {"weight_version": self.labels[-1]}

    async def completions(self, body: dict[str, Any]) -> Any:
        tokens, k = body["prompt"], body["prompt_logprobs"]
        self.check_prompt(tokens, body["max_tokens"])
        if k > self.max_logprobs:
            raise WhetError(f"Requested prompt logprobs of {k}, which is greater than max allowed: {self.max_logprobs}")
        entries: list[Any] = [None]
        for token, (logprob, best) in zip(tokens[1:], self.prompt_logprobs(tokens, k), strict=True):
            named = {token: logprob, **dict(best)}
            ranks = [found for found, _ in best]
            entries.append(
                {
                    str(name): {"logprob": value, "rank": ranks.index(name) + 1 if name in ranks else k + 1}
                    for name, value in named.items()
                }
            )
        return {"choices": [{"text": "", "prompt_logprobs": entries}]}

    async def rpc(self, body: dict[str, Any]) -> Any:
        assert body["method"] == "reload_weights"
        await self.load(body["kwargs"]["weights_path"])
        return {"results": [None]}

    async def generate(self, body: dict[str, Any]) -> Any:
        settings = body["sampling_params"]
        assert body["model"] == "tiny"
        assert settings["ignore_eos"]
        urls = [str(part["url"]) for part in body.get("content_parts", ()) if part["type"] == "image_url"]
        prompt = self.expanded(body["token_ids"], urls)
        read = {"prompt_token_ids": self.images.marked(prompt)} if self.images and body.get("return_token_ids") else {}
        request = prompt, settings, settings["max_tokens"], settings["seed"], urls
        if body.get("stream"):
            return self.streamed(read, *request)
        done = await self.sample(*request)
        return {"choices": [self.choice(done, 0, True)], "usage": self.usage(done), **read}

    def choice(self, done: Any, first: int, ended: bool) -> dict[str, Any]:
        """The tokens of a completion from the ``first`` on; the reason and the versions come with the last ones."""
        oldest, newest = (self.labels[version] for version in done.versions)
        spans = [{"version": label, "start": 0, "end": 1} for label in dict.fromkeys([oldest, newest])]
        pairs = list(zip(done.tokens, done.logprobs, strict=True))[first:]
        content = [{"token_id": token, "logprob": logprob} for token, logprob in pairs]
        end = {"finish_reason": done.finish_reason, "weight_versions": spans} if ended else {"finish_reason": None}
        return {"token_ids": done.tokens[first:], "logprobs": {"content": content}, **end}

    def usage(self, done: Any) -> dict[str, Any]:
        return {"prompt_tokens_details": {"cached_tokens": done.cached}}

    async def streamed(self, read: dict[str, Any], *request: Any) -> AsyncIterator[Any]:
        first, begun = 0, None
        async for done, ended in self.pieces(*request):
            yield {"choices": [self.choice(done, first, ended)], **({} if begun else read)}
            begun = begun or done
            first = len(done.tokens)
        yield {"choices": [], "usage": self.usage(begun)}


class Sglang(Double):
    incremental = False  # whether the events of a stream hold only the new tokens

    def routes(self) -> dict[str, Answer]:
        return {
            "/health": self.nothing,
            "/get_server_info": self.facts,
            "/get_model_info": self.model_info,
            "/tokenize": self.tokenize,
            "/generate": self.generate,
            "/pause_generation": self.pause,
            "/update_weights_from_disk": self.update,
            "/update_weight_version": self.rename,
            "/flush_cache": self.nothing,
            "/continue_generation": self.resume,
        }

    async def facts(self, body: dict[str, Any]) -> Any:
        return {"model_path": "tiny", "context_length": self.context, "enable_deterministic_inference": True}

    async def model_info(self, body: dict[str, Any]) -> Any:
        return {"weight_version": self.labels[-1]}

    async def update(self, body: dict[str, Any]) -> Any:
        await self.load(body["model_path"])
        self.labels.append(body["weight_version"])
        return {"success": True, "message": ""}

    async def generate(self, body: dict[str, Any]) -> Any:
        settings = body["sampling_params"]
        assert body["return_logprob"]
        if "logprob_start_len" in body:
            return self.scored(body["input_ids"], body["logprob_start_len"], body["top_logprobs_num"])
        assert settings["ignore_eos"]
        urls = body.get("image_data") or []
        prompt = self.expanded(body["input_ids"], urls)
        read = {"prompt_token_ids": self.images.marked(prompt)} if body.get("return_prompt_token_ids") else {}
        request = prompt, settings, settings["max_new_tokens"], settings["sampling_seed"], urls
        if body.get("stream"):
            return self.streamed(read, *request)
        return self.answer(await self.sample(*request), 0, True) | read

    def answer(self, done: Any, first: int, ended: bool) -> dict[str, Any]:
        rows = [[p, t, None] for t, p in zip(done.tokens, done.logprobs, strict=True)]
        facts = {
            "output_token_logprobs": rows[first:],
            "completion_tokens": len(rows),
            "finish_reason": {"type": done.finish_reason} if ended else None,
            "weight_version": self.labels[done.versions[1]],
            "cached_tokens": done.cached,
        }
        return {"text": "", "output_ids": done.tokens[first:], "meta_info": facts}

    async def streamed(self, read: dict[str, Any], *request: Any) -> AsyncIterator[Any]:
        first = 0
        async for done, ended in self.pieces(*request):
            yield self.answer(done, first, ended) | read
            first = len(done.tokens) if self.incremental else 0

    def scored(self, tokens: list[int], start: int, k: int) -> Any:
        self.check_prompt(tokens, 1)
        found = self.prompt_logprobs(tokens, k)[start:]
        own = [[logprob, token, None] for token, (logprob, _) in zip(tokens[start + 1 :], found, strict=True)]
        best = [[[value, token, None] for token, value in each] for _, each in found]
        facts = {"input_token_logprobs": [[None, tokens[start], None], *own]}
        if k:
            facts["input_top_logprobs"] = [None, *best]
        return {"text": "", "output_ids": [0], "meta_info": facts}


class IncrementalSglang(Sglang):
    """With ``--incremental-streaming-output``."""

    incremental = True


KINDS = {"vllm": Vllm, "sglang": Sglang, "incremental_sglang": IncrementalSglang}


async def _events(values: AsyncIterator[Any]) -> AsyncIterator[str]:
    async for value in values:
        yield f"data: {json.dumps(value)}\n\n"
    yield "data: [DONE]\n\n"


def application(routes: dict[str, Answer]) -> Starlette:
    def endpoint(answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        async def respond(request: Request) -> Response:
            body = await request.body()
            try:
                found = await answer(json.loads(body) if body else {})
                if isinstance(found, AsyncIterator):
                    return StreamingResponse(_events(found), media_type="text/event-stream")
                return JSONResponse(found)
            except WhetError as error:
                return JSONResponse({"error": str(error)}, 400)

        return respond

    return Starlette(routes=[Route(path, endpoint(answer), methods=["GET", "POST"]) for path, answer in routes.items()])


def serve(protocol: str, folder: Path, port: int, ready: Callable[[int], object]) -> None:
    """Serve until the process is killed. ``ready`` is called with the port."""
    import uvicorn

    listener = listen("127.0.0.1", port)
    double = KINDS[protocol](folder)
    ready(listener.getsockname()[1])
    server = uvicorn.Server(uvicorn.Config(application(double.routes()), log_level="error", lifespan="off"))
    asyncio.run(server.serve([listener]))


class Running:
    """A double in a process. Its port stays reserved for another one in its place."""

    def __init__(self, protocol: str, folder: Path, port: int = 0) -> None:
        self.reserved = None if port else Reservation(LOOPBACK)
        if self.reserved is not None:
            port = int(self.reserved.address.rpartition(":")[2])
        asked, answer = PROCESSES.Pipe(duplex=False)
        self.process = PROCESSES.Process(target=serve, args=(protocol, folder, port, answer.send), daemon=True)
        self.process.start()
        answer.close()
        self.port = asked.recv()
        self.url = f"http://127.0.0.1:{self.port}"
        for _ in range(600):
            with suppress(OSError):
                urllib.request.urlopen(f"{self.url}/health", timeout=60).close()
                return
            time.sleep(0.1)
        raise TimeoutError(self.url)

    def send(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@contextmanager
def doubles(protocol: str, folder: Path, count: int = 1) -> Iterator[list[Running]]:
    running: list[Running] = []
    try:
        running.extend(Running(protocol, folder) for _ in range(count))
        yield running
    finally:
        for one in running:
            one.kill()


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]), int([*sys.argv, "0"][3]), lambda port: print(port, flush=True))
