"""``whet serve``: a model answers OpenAI's client as each call wants it, and Ctrl-C ends it."""

import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.endpoint.agents import RENDERER, Scripted, Streaming
from tests.toy import toy_recipe
from whet.cli.main import main
from whet.endpoint.request import ApiError, Question, RequestedSampling
from whet.run import run
from whet.run.serve import ServedModel

ROOT = Path(__file__).parents[2]


@contextmanager
def served(*words: str) -> Iterator[tuple[subprocess.Popen[str], openai.OpenAI, str]]:
    """The process, a client of it, and the name of its model."""
    command = [sys.executable, "-m", "whet", "serve", *words, "--port", "0", "generator.max_context=512"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert " is served at http://127.0.0.1:" in first, process.communicate(timeout=100)[1]
        name, url = first.strip().split(" is served at ")
        token = process.stdout.readline().removeprefix("token: ").strip()
        yield process, openai.OpenAI(base_url=url, api_key=token, max_retries=0, timeout=60), name
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., str]]:
    """The error of ``whet serve`` with some words. Its port is taken: what is not refused ends with another error,
    and serves nothing."""
    with socket.create_server(("127.0.0.1", 0)) as taken:

        def error(*words: str) -> str:
            with pytest.raises(SystemExit, match="2"):
                main(["serve", *words, "--port", str(taken.getsockname()[1])])
            return capsys.readouterr().err

        yield error


@pytest.mark.slow
def test_a_run_answers_and_ends_with_ctrl_c(tiny_model: Path, tmp_path: Path) -> None:
    folder = run.start(toy_recipe(tiny_model, steps=1, evaluation={"enabled": False}), tmp_path / "it's")
    with served(str(folder)) as (process, client, name):
        assert name == "it's"
        assert process.stdout is not None
        curl = next(line for line in process.stdout if line.startswith("curl "))
        said: list[Any] = [{"role": "user", "content": "hi"}]
        asked: dict[str, Any] = {"model": name, "messages": said, "max_tokens": 8, "temperature": 0}
        first, second = (client.chat.completions.create(**asked) for _ in range(2))
        assert first.choices[0].message == second.choices[0].message
        chunks = client.chat.completions.create(**asked, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == first.choices[0].message.content
        assert first.usage is not None
        assert first.usage.completion_tokens <= 8
        with pytest.raises(openai.NotFoundError, match='serves "it\'s"'):
            client.chat.completions.create(**{**asked, "model": "gpt-x"})
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="stolen").models.list()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert out.endswith("stopped\n")
    assert json.loads(shlex.split(curl)[-1])["model"] == name, "a shell reads the line as it is meant"
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_folder_that_is_no_run_is_served_as_a_model(tiny_model: Path) -> None:
    with served(str(tiny_model), "--token", "secret") as (_, client, name):
        assert client.api_key == "secret"
        assert [model.id for model in client.models.list()] == [name] == [tiny_model.name]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.path=nowhere", "model 'nowhere': there is no such folder"),
        ("chat_template=nowhere.jinja", "the chat template nowhere.jinja can't be read"),
    ],
)
def test_a_setting_of_the_model_is_read_where_a_run_learned_from_rows(
    override: str, message: str, tiny_model: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1 + 1?", "completion": "2"}) + "\n")
    data = f"{{path: {rows}, test_path: null}}"
    (tmp_path / "recipe.yaml").write_text(f"extends: sft\nmodel: {tiny_model}\ndata: {data}\n")
    assert message in refused(str(tmp_path), override)


def test_a_model_is_not_served_in_the_place_of_another(tiny_model: Path, refused: Callable[..., str]) -> None:
    assert f"{tiny_model} is the model already" in refused(str(tiny_model), "model.path=nowhere")


def test_a_port_that_is_taken_is_an_error(tiny_model: Path, refused: Callable[..., str]) -> None:
    assert "port" in refused(str(tiny_model), "generator.max_context=512")


def answer(**sampling: Any) -> tuple[Any, Scripted]:
    """Return the answer of a scripted model with a context of 100 tokens, and the model."""
    model: Any = Scripted(lambda _: "word " * 50)
    model.gate.set()
    text = sampling.pop("text", "hi")
    limit = sampling.pop("limit", None)
    question = Question([{"role": "user", "content": text}], None, limit, RequestedSampling(**sampling))
    return asyncio.run(ServedModel(model, RENDERER, 100, seed=0).answer(question, False)), model


def test_each_call_decides_how_it_is_sampled_within_the_context() -> None:
    got, model = answer(temperature=0.5, top_p=0.9, top_k=-1, seed=7, stop=("END",))
    [params] = model.requests
    assert (params.distribution.temperature, params.distribution.top_p, params.distribution.top_k) == (0.5, 0.9, 0)
    assert params.stop == ("END",)
    assert len(got.prompt) + params.max_new_tokens == 100
    assert not got.complete
    assert answer(limit=5)[1].requests[0].max_new_tokens == 5
    assert answer(temperature=0.0)[1].requests[0].greedy


@pytest.mark.parametrize("stop", ["END", "\n\nE"])
def test_the_text_that_ends_a_reply_is_not_sent(stop: str) -> None:
    seen: list[str] = []
    model: Any = Streaming(lambda _: f"the E of all\n{stop}!")
    model.gate.set()
    model.rest.set()
    question = Question([{"role": "user", "content": "hi"}], sampling=RequestedSampling(stop=("never", stop)))
    served = ServedModel(model, RENDERER, 100, seed=0)
    got = asyncio.run(served.answer(question, False, lambda *parts: seen.append(parts[-1])))
    assert got.message["content"] == "the E of all\n"
    assert len(seen) > 3
    assert all("the E of all\n".startswith(text) for text in seen)
    assert stop in RENDERER.decode(got.tokens), "the tokens are what was sampled"


@pytest.mark.parametrize(
    ("sampling", "why"),
    [
        ({"text": "x" * 100}, "leaves no room for a reply in the context of 100 tokens"),
        ({"temperature": 0.0001}, "temperature: "),
        ({"stop": ("",)}, "stop: "),
    ],
)
def test_what_can_not_be_met_is_refused(sampling: dict[str, Any], why: str) -> None:
    with pytest.raises(ApiError, match=why) as refused:
        answer(**sampling)
    assert refused.value.status == 400
