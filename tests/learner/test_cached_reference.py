"""Reference log-probs in a file: the same numbers, looked up by tokens, and no reference model in memory."""

import contextlib
import logging
from pathlib import Path

import pytest
import torch

from tests.learner.parts import PolicyGradient, some_batch
from tests.learner.test_learner import config, with_learner
from whet.base.files import load_tensors, save_tensors
from whet.learner import cached_reference
from whet.learner.cached_reference import CachedReference
from whet.learner.learner import WorkerLearner
from whet.models.config import LoraSettings

FACTS = {"model": "one", "precision": "float64"}
REFERENCE = {"reference_logprobs"}


class Asked:
    """A learner of which is noted whether it holds its reference model."""

    def __init__(self, learner: WorkerLearner) -> None:
        self.learner, self.holds_reference = learner, False

    async def score(self, batch, columns, top=None):
        self.holds_reference |= "reference_logprobs" in columns
        return await self.learner.score(batch, columns, top)

    async def release_reference(self) -> None:
        self.holds_reference = False
        await self.learner.release_reference()


async def fill(learner: WorkerLearner | Asked, path: Path, facts=FACTS, batches=None):
    cached = CachedReference(learner, path, facts)
    with cached.filling():
        for batch in batches or [some_batch(0), some_batch(1)]:
            await cached.score(batch, {"logprobs", "reference_logprobs"})
    await cached.finish()
    return cached


def settings(model: Path, lora: bool):
    made = config(model)
    adapter = LoraSettings(rank=2, alpha=4.0) if lora else None
    return made.model_copy(update={"model": made.model.model_copy(update={"lora": adapter})})


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_what_was_computed_once_is_what_is_computed_live_also_after_learning(llama, tmp_path, lora):
    async def go(learner: WorkerLearner) -> None:
        live = [(await learner.score(some_batch(seed), REFERENCE))["reference_logprobs"] for seed in (0, 1)]
        asked = Asked(learner)
        cached = await fill(asked, tmp_path / "reference.safetensors")
        assert not asked.holds_reference
        batch = some_batch(0)
        batch.advantages = torch.ones(len(batch))
        await learner.update(batch, PolicyGradient())
        for seed in (0, 1):
            said = await cached.score(some_batch(seed), {"logprobs", "reference_logprobs"})
            assert torch.equal(said["reference_logprobs"], live[seed])
            assert not torch.allclose(said["logprobs"], live[seed], atol=1e-4), "the policy has learned"
        assert not asked.holds_reference, "nothing loaded it again"

    with_learner(settings(llama, lora), go)


def test_other_packings_and_layouts_find_the_same_sequences(llama, tmp_path):
    async def go(learner: WorkerLearner) -> None:
        cached = await fill(learner, tmp_path / "reference.safetensors")
        separate = some_batch(0, share_prompts=False)
        part, tokens = separate.select(torch.tensor([1, 4]))
        found = (await cached.score(part, REFERENCE))["reference_logprobs"]
        live = (await learner.score(separate, REFERENCE))["reference_logprobs"]
        torch.testing.assert_close(found, live[tokens], atol=1e-6, rtol=0)

    with_learner(config(llama), go)


def test_a_second_start_reads_the_file_and_computes_nothing(llama, tmp_path, caplog):
    path = tmp_path / "reference.safetensors"

    async def go(learner: WorkerLearner) -> None:
        first = await fill(learner, path)
        stamp = path.stat().st_mtime_ns
        again = await fill(learner, path)
        assert again.computed == 0
        assert first.computed == len(again.cached) == 8
        assert all(torch.equal(column, first.cached[name]) for name, column in again.cached.items())
        assert path.stat().st_mtime_ns == stamp
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]

    with_learner(config(llama), go)


@pytest.mark.parametrize("name", ["model", "precision"])
def test_a_file_of_another_model_or_precision_is_said_and_computed_anew(llama, tmp_path, caplog, name):
    path = tmp_path / "reference.safetensors"

    async def go(learner: WorkerLearner) -> None:
        await fill(learner, path)
        again = await fill(learner, path, FACTS | {name: "another"})
        assert again.computed == 8
        assert f"was made with another {name}" in caplog.text

    with_learner(config(llama), go)


def test_rows_whose_tokens_changed_are_said_and_computed(llama, tmp_path, caplog):
    path = tmp_path / "reference.safetensors"
    changed = some_batch(0)
    last = int(changed.trained.nonzero().max())
    changed.tokens[last] = (changed.tokens[last] + 1) % 32

    async def go(learner: WorkerLearner) -> None:
        await fill(learner, path)
        again = await fill(learner, path, batches=[changed])
        assert again.computed == 1
        assert "lacked 1 sequences" in caplog.text
        live = (await learner.score(changed, REFERENCE))["reference_logprobs"]
        found = (await again.score(changed, REFERENCE))["reference_logprobs"]
        torch.testing.assert_close(found, live, atol=1e-6, rtol=0)

    with_learner(config(llama), go)


@pytest.mark.parametrize("damage", ["cut", "empty", "foreign", "nameless"])
def test_a_damaged_file_is_said_and_computed_anew(llama, tmp_path, caplog, damage):
    path = tmp_path / "reference.safetensors"

    async def go(learner: WorkerLearner) -> None:
        await fill(learner, path)
        whole = path.read_bytes()
        if damage == "nameless":
            tensors = load_tensors(path)
            save_tensors(path, tensors | {"sequences": tensors["sequences"][:-16]})
        else:
            path.write_bytes({"cut": whole[:-7], "empty": b"", "foreign": b"hello" * 50}[damage])
        assert (await fill(learner, path)).computed == 8
        assert "is damaged" in caplog.text
        assert path.read_bytes() == whole
        assert set(load_tensors(path)) == {"facts", "sequences", "lengths", "logprobs"}

    with_learner(config(llama), go)


def test_a_sequence_that_was_not_foreseen_is_computed_and_said(llama, tmp_path, caplog):
    async def go(learner: WorkerLearner) -> None:
        path = tmp_path / "reference.safetensors"
        asked = Asked(learner)
        cached = await fill(asked, path, batches=[some_batch(0)])
        found = (await cached.score(some_batch(1), REFERENCE))["reference_logprobs"]
        assert not asked.holds_reference, "it was let go again"
        assert (await fill(learner, path)).computed == 0, "it was saved"
        live = (await learner.score(some_batch(1), REFERENCE))["reference_logprobs"]
        assert torch.equal(found, live)
        assert "the reference model is loaded" in caplog.text

    with_learner(config(llama), go)


def test_what_was_computed_before_a_filling_was_interrupted_is_kept(llama, tmp_path):
    path = tmp_path / "reference.safetensors"

    async def go(learner: WorkerLearner) -> None:
        cached = CachedReference(learner, path, FACTS)
        with contextlib.suppress(KeyboardInterrupt), cached.filling():
            await cached.score(some_batch(0), REFERENCE)
            assert not path.exists(), "not after each batch"
            raise KeyboardInterrupt
        assert len(CachedReference(learner, path, FACTS).cached) == 4
        again = await fill(learner, path)
        assert again.computed == 4
        stamp = path.stat().st_mtime_ns
        await again.finish()
        assert path.stat().st_mtime_ns == stamp, "there is nothing more to write"

    with_learner(config(llama), go)


def test_a_kill_while_filling_loses_only_what_was_computed_last(llama, tmp_path, monkeypatch):
    path = tmp_path / "reference.safetensors"

    async def go(learner: WorkerLearner) -> None:
        cached = CachedReference(learner, path, FACTS)
        with cached.filling():
            monkeypatch.setattr(cached_reference, "SAVE_EVERY_S", 0.0)
            await cached.score(some_batch(0), REFERENCE)
            monkeypatch.setattr(cached_reference, "SAVE_EVERY_S", 60.0)
            await cached.score(some_batch(1), REFERENCE)
            assert len(CachedReference(learner, path, FACTS).cached) == 4, "what a kill would leave now"
        assert len(CachedReference(learner, path, FACTS).cached) == 8

    with_learner(config(llama), go)


def test_a_file_that_is_only_read_stays_as_it_is(llama, tmp_path):
    path = tmp_path / "reference.safetensors"

    async def go(learner: WorkerLearner) -> None:
        await fill(learner, path, batches=[some_batch(0)])
        before = path.read_bytes()
        cached = CachedReference(learner, path, FACTS, read_only=True)
        found = (await cached.score(some_batch(1), REFERENCE))["reference_logprobs"]
        assert found.any()
        assert path.read_bytes() == before

    with_learner(config(llama), go)


def test_a_batch_without_sequences_asks_nobody(llama, tmp_path):
    from whet.core.batch import Batch

    async def go(learner: WorkerLearner) -> None:
        cached = await fill(learner, tmp_path / "reference.safetensors")
        said = await cached.score(Batch.from_groups([]), REFERENCE)
        assert said["reference_logprobs"].numel() == 0

    with_learner(config(llama), go)
