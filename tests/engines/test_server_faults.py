"""Servers that are lost, that return, that are used by another run, and that can't serve a run at all."""

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn

from tests.contracts.engine_contract import run
from tests.engines.server_double import Answer, Running, application, doubles
from tests.tiny import tiny_llama, tiny_tokenizer
from tests.weights.collected import Listed
from whet.base.errors import ConfigError, GeneratorError, RefitError, WhetError
from whet.cluster.rendezvous import LOOPBACK, Reservation
from whet.engines.base import Engine, SamplingParams
from whet.engines.server.client import Client
from whet.engines.server.config import RemoteConfig
from whet.weights.config import WeightSyncConfig
from whet.weights.engine import EngineSync

PROTOCOLS = pytest.mark.parametrize("protocol", ["vllm", pytest.param("sglang", marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(initializer_range=0.3).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def engine(urls: list[str], **settings: Any) -> Any:
    settings = {"dtype": "float32", "max_context": 512, "deadline": 20.0, **settings}
    return RemoteConfig(urls=urls, **settings).build(tiny_llama().config, tiny_tokenizer())


async def publish(to: Engine[Any], version: int) -> None:
    weights = Listed(list(tiny_llama(initializer_range=0.3).state_dict().items()))
    await EngineSync(WeightSyncConfig(), [1, 2, 3]).load(weights, to, version)


@PROTOCOLS
@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)], ids=["killed", "frozen"]
)
def test_the_answers_of_a_lost_server_come_from_another_one_and_it_serves_again_when_it_returns(
    protocol: str, how: signal.Signals, model_folder: Path
) -> None:
    with doubles(protocol, model_folder, 2) as servers:
        router = engine(
            [s.url for s in servers], protocol=protocol, deadline=30.0
        )  # a busy server must not look frozen

        async def body() -> None:
            await publish(router, 1)
            (model_folder / "held").touch()
            answers = [
                asyncio.ensure_future(router.sample([i, 2, 3], SamplingParams(400, seed=i), f"s{i}")) for i in range(8)
            ]
            await router.sample([9, 9], SamplingParams(1), "")
            servers[1].send(how)
            (model_folder / "held").unlink()
            done = await asyncio.gather(*answers)
            assert [len(answer.tokens) for answer in done] == [400] * 8
            assert {answer.versions for answer in done} == {(1, 1)}
            assert router.serving == {0}
            if how == signal.SIGKILL:
                servers[1].kill()
                servers[1] = Running(protocol, model_folder, servers[1].port)
            else:
                servers[1].send(signal.SIGCONT)
            version, ends = 1, time.monotonic() + 60
            while router.serving != {0, 1} and time.monotonic() < ends:
                version += 1
                await publish(router, version)
                await asyncio.sleep(0.2)
            for place in range(2):
                answer = await router.replicas[place].sample([1, 2], SamplingParams(4), "")
                assert answer.versions == (version, version)
            metrics = router.tally().result()
            assert metrics["generator/lost"] == 1
            assert metrics["generator/restarts"] == 1

        run(router, body)


@PROTOCOLS
def test_without_another_server_a_lost_one_is_the_error_of_the_run(protocol: str, model_folder: Path) -> None:
    with doubles(protocol, model_folder) as (server,):
        alone = engine([server.url], protocol=protocol)

        async def body() -> None:
            await publish(alone, 1)
            server.kill()
            with pytest.raises(GeneratorError, match=f"{server.url} gives no answer"):
                await alone.sample([1, 2], SamplingParams(4), "")

        run(alone, body)


@PROTOCOLS
def test_a_run_whose_servers_are_all_lost_ends_with_the_name_of_the_last(protocol: str, model_folder: Path) -> None:
    with doubles(protocol, model_folder, 2) as servers:
        router = engine([s.url for s in servers], protocol=protocol)

        async def body() -> None:
            await publish(router, 1)
            for server in servers:
                server.kill()
            with pytest.raises(GeneratorError, match=r"the server http://127\..* gives no answer"):
                await router.sample([1, 2], SamplingParams(4), "")
            assert router.tally().result()["generator/lost"] == 1

        run(router, body)


@pytest.mark.slow
def test_a_server_that_another_run_uses_is_lost(model_folder: Path) -> None:
    with doubles("vllm", model_folder) as (server,):
        alone = engine([server.url])

        async def body() -> None:
            await publish(alone, 1)
            other = Client(server.url, None, 20.0)
            await other.post("/update_weight_version", {"new_version": "whet-other-1"})
            await other.post("/pause?mode=keep")
            await other.post("/resume")
            await other.close()
            with pytest.raises(GeneratorError, match="'whet-other-1', which this run did not publish"):
                await alone.sample([1, 2], SamplingParams(4), "")

        run(alone, body)


def test_a_server_that_does_not_see_the_folder_is_named_with_the_setting(model_folder: Path, tmp_path: Path) -> None:
    with served(vllm_like({})) as url:
        alone = engine([url], folder=tmp_path)

        async def body() -> None:
            with pytest.raises(RefitError, match=f"{url} refuses /collective_rpc.*no such folder.*generator.folder"):
                await publish(alone, 1)

        run(alone, body)
    assert not list(tmp_path.iterdir())


def vllm_like(change: dict[str, Any]) -> dict[str, Answer]:
    """Return the interface of a server that accepts a run, with ``change`` instead of some of its answers. It loads
    no weights."""

    def answer(value: Any) -> Answer:
        async def respond(body: dict[str, Any]) -> Any:
            if isinstance(value, Exception):
                raise value
            return value(body) if callable(value) else value

        return respond

    def encode(body: dict[str, Any]) -> Any:
        return {"tokens": tiny_tokenizer().encode(body["prompt"], add_special_tokens=False)}

    completion = {"token_ids": [5], "finish_reason": "length", "logprobs": {"content": [{"logprob": 0.0}]}}
    answers = {
        "/health": {},
        "/v1/models": {"data": [{"id": "tiny", "max_model_len": 512}]},
        "/weight_info": {"weight_version": "default"},
        "/tokenize": encode,
        "/inference/v1/generate": {"choices": [completion | {"weight_versions": []}]},
        "/collective_rpc": WhetError("no such folder"),
        **{name: {"success": True} for name in ("/pause", "/resume", "/update_weight_version", "/reset_prefix_cache")},
    }
    return {path: answer(value) for path, value in (answers | change).items() if value is not None}


@contextmanager
def served(routes: dict[str, Answer]) -> Iterator[str]:
    """Serve an interface from a thread."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(application(routes), log_level="error", lifespan="off"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()


def sampled(*logprobs: float) -> dict[str, Any]:
    content = [{"logprob": logprob} for logprob in logprobs]
    choice = {"token_ids": [5] * len(logprobs), "finish_reason": "length", "logprobs": {"content": content}}
    return {"/inference/v1/generate": {"choices": [choice | {"weight_versions": []}]}}


REFUSED = [
    ({"/health": None}, {}, "another program answers there"),
    ({"/weight_info": None}, {}, "takes no new weights.*VLLM_SERVER_DEV_MODE=1"),
    ({"/v1/models": {"data": [{"id": "a"}, {"id": "b"}]}}, {}, "serves a, b; set generator.model"),
    ({}, {"model": "large"}, "serves tiny; set generator.model"),
    ({}, {"max_context": 1024}, "at most 512 tokens.*--max-model-len 1024"),
    ({"/tokenize": {"tokens": [1]}}, {}, "has another tokenizer than model.path"),
    ({"/inference/v1/generate": WhetError("out of vocabulary")}, {}, "serves another model"),
    (sampled(-2.0), {}, "-2 instead of 0.*processed_logprobs"),
    (sampled(3.2), {}, "or logits: a token that was the only candidate has 3.2"),
    (sampled(), {}, "sampled 0 tokens where it was asked for 1"),
    ({"/tokenize": "<html>"}, {}, "gives no tokens of a text at /tokenize"),
    ({"/weight_info": {}}, {}, "does not tell the version of its weights"),
    ({"/inference/v1/generate": {"choices": [{"token_ids": [5]}]}}, {}, "without tokens, log-probs or the version"),
]


@pytest.mark.parametrize(("change", "settings", "words"), REFUSED, ids=[words[:24] for *_, words in REFUSED])
def test_a_server_that_cannot_serve_the_run_is_refused_before_any_weight_is_sent(
    change: dict[str, Any], settings: dict[str, Any], words: str
) -> None:
    with served(vllm_like(change)) as url:
        alone = engine([url], **settings)

        async def body() -> None:
            with pytest.raises((ConfigError, GeneratorError), match=f"(?s){url}.*{words}|{words}.*{url}"):
                await publish(alone, 1)

        run(alone, body)


def test_where_nothing_listens_the_servers_are_to_be_started() -> None:
    reserved = Reservation(LOOPBACK)
    url = f"http://{reserved.address}"
    alone = engine([url])

    async def body() -> None:
        with pytest.raises(ConfigError, match=f"nothing answers at {url}.*start the servers first"):
            await publish(alone, 1)

    run(alone, body)


def test_a_key_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(ConfigError, match="environment variable MY_KEY is not set"):
        engine(["http://127.0.0.1:1"], api_key_env="MY_KEY")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"urls": []}, "at least 1"),
        ({"urls": ["localhost:8000"]}, "not the address of a server"),
        ({"urls": ["http://user:secret@host"]}, "has a password"),
        ({"urls": ["http://a:1", "http://a:1/v1/"]}, "two URLs are the same"),
        ({"urls": ["http://a:1"], "replicas": 3}, "urls names 1 servers"),
        ({"urls": ["http://a:1"], "protocol": "sglang", "on_refit": "keep"}, "set on_refit=recompute"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_settings_are_refused_with_the_cure(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RemoteConfig(**settings)


def test_the_files_are_of_the_dtype_of_the_settings() -> None:
    assert engine(["http://127.0.0.1:1"], dtype="bfloat16").dtype == torch.bfloat16
