"""A vLLM engine of two ranks: each gets the weights and proves its own part, and it ends when one of them dies."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from tests.tiny import tiny_llama, tiny_qwen3
from tests.vllm_engine import Loop, Parts, load, make
from tests.weights.collected import weights_of
from tests.weights.faults import FAULTS
from tests.weights.test_in_process import learn_something
from whet.base.errors import DeadlineError, GeneratorError, RefitError
from whet.core.types import Distribution
from whet.engines.base import SamplingParams
from whet.engines.vllm.guard import marked

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PROMPTS = [[5, 6, 7], list(range(70)), [263, 0, 200, 159, 160, 161]]  # of both halves of the vocabulary


@pytest.fixture(scope="module")
def parts(loop: Loop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    """Two ranks. The model is untied, with biases at every product; the vocabulary of 264 is filled up to 320, so that
    the second rank holds 104 rows and 56 of padding."""
    model = tiny_llama(initializer_range=0.3, attention_bias=True, mlp_bias=True)
    parts = Parts(model, tmp_path_factory.mktemp("untied"), generator={"tensor": 2, "threads": 2, "deadline": 300.0})
    yield parts
    met = _met(parts.generator)
    parts.close(loop)
    _check_nothing_is_left(parts.generator, met)


@pytest.mark.parametrize("transport", ["shared_memory", "cuda_ipc"])
def test_every_rank_reads_back_its_part_and_samples_as_transformers_does(
    parts: Parts, loop: Loop, transport: str
) -> None:
    async def go() -> None:
        sync = parts.sync(transport=transport)
        await parts.publish(sync)
        await learn_something(parts.learner)
        metrics = await parts.publish(sync)
        assert metrics["refit/unread"] == 0
        assert metrics["refit/probe_max"] < 1e-3
        assert len(parts.generator.engine.processes.ids) == 3  # the engine's core and two ranks
        reference = tiny_llama(attention_bias=True, mlp_bias=True)
        reference.load_state_dict(dict(await weights_of(parts.learner)))
        params = [SamplingParams(40, seed=i, distribution=Distribution(0.7)) for i in range(len(PROMPTS))]
        sampled = [parts.generator.sample(prompt, p, "s") for prompt, p in zip(PROMPTS, params, strict=True)]
        for prompt, completion in zip(PROMPTS, await asyncio.gather(*sampled), strict=True):
            tokens = torch.tensor(completion.tokens)
            with torch.no_grad():
                logits = reference(torch.tensor([prompt + completion.tokens])).logits[0, len(prompt) - 1 : -1]
            expected = (logits / 0.7).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-3, rtol=0)

    loop.run(go())


@pytest.mark.parametrize("layer", ["model.layers.1.mlp.down_proj", "model.layers.0.self_attn.qkv_proj", "lm_head"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_layer_that_one_rank_did_not_renew_is_named_with_the_rank(
    parts: Parts, loop: Loop, layer: str, rank: int
) -> None:
    async def go() -> None:
        sync = parts.sync()
        await parts.publish(sync)
        await learn_something(parts.learner)
        await parts.generator.call(FAULTS, "keep", layer, rank)
        expected = layer.replace("qkv_proj", "q_proj").replace(".", r"\.")
        with pytest.raises(RefitError, match=rf"rank {rank} of the engine: .* layers compute with .*{expected}"):
            await parts.publish(sync)

    loop.run(go())


def test_a_rank_that_fails_is_named_and_a_complete_set_makes_it_good_again(parts: Parts, loop: Loop) -> None:
    async def go() -> None:
        sync = parts.sync()
        await parts.generator.call(FAULTS, "raise_once", 0)
        with pytest.raises(GeneratorError, match=r"failed at take on rank 0: ValueError: no room left"):
            await parts.publish(sync)
        assert (await parts.publish(sync))["refit/unread"] == 0

    loop.run(go())


def test_no_rank_listens_beyond_this_machine(parts: Parts, loop: Loop) -> None:
    loop.run(parts.publish(parts.sync()))
    listening = [
        connection.laddr.ip
        for number in (*parts.generator.engine.processes.ids, os.getpid())
        for connection in psutil.Process(number).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert set(listening) <= {"127.0.0.1", "::1"}


def _met(generator: Any) -> str:
    """The name of the file through which the ranks met, and of the memory that they share."""
    (met,) = generator.engine.processes.folder.glob("vllm_dist_*")
    return str(met.name)


def _check_nothing_is_left(generator: Any, met: str) -> None:
    assert not marked(generator.engine.processes.mark)
    assert generator.engine.processes.guard.poll() is not None
    assert not generator.engine.processes.folder.exists()
    assert not list(Path("/dev/shm").glob(f"{met}*"))


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["frozen", "killed"])
def test_one_rank_that_freezes_or_dies_ends_the_engine_in_time(loop: Loop, how: signal.Signals) -> None:
    model = tiny_qwen3()
    generator = make(model, tensor=2, deadline=10.0)

    async def go() -> None:
        await load(model, generator)
        ranks = [process for process in map(psutil.Process, generator.engine.processes.ids) if process.children() == []]
        under_way = asyncio.ensure_future(generator.sample([5, 6, 7], SamplingParams(490), "s"))
        await generator.sample([5, 6, 7], SamplingParams(2), "s")
        ranks[-1].send_signal(how)
        started = time.monotonic()
        for wait in (under_way, generator.sample([5, 6, 7], SamplingParams(2), "s"), generator.pause()):
            with pytest.raises((GeneratorError, DeadlineError), match=str(ranks[-1].pid)):
                await wait
        assert time.monotonic() - started < 40

    try:
        loop.run(go(), 540)  # most of it is the start
    finally:
        met = _met(generator)
        loop.run(generator.close())
    _check_nothing_is_left(generator, met)
