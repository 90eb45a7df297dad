"""Part C of ``gpu.py``: the phases of a step other than learning: sampling, publication, sleep, checkpoints, and
a few steps of GRPO as a whole."""

import asyncio
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gpu import Row, Setting, check, wait, within

from whet.engines.base import SamplingParams
from whet.engines.torch.config import TorchGeneratorConfig


def _folder(scratch: str, s: Setting) -> Path:
    """A random model of Qwen3-0.6B's shape (tiny where all is small) and a tokenizer, as files."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    from tests.tiny import tiny_qwen3, tiny_tokenizer

    tiny_tokenizer().save_pretrained(scratch)
    if s.small:
        tiny_qwen3().save_pretrained(scratch)
        return Path(scratch)
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
    config = Qwen3Config(**sizes, num_key_value_heads=8, head_dim=128, vocab_size=151_936, tie_word_embeddings=True)
    with s.device:
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(scratch)
    return Path(scratch)


@check("C1")
def sampling(s: Setting) -> Iterator[Row]:
    """The built-in generator: tokens a second, by rows."""
    from transformers import AutoConfig

    from whet.models.config import ModelConfig
    from whet.models.loading import load_model

    with tempfile.TemporaryDirectory() as scratch:
        folder = _folder(scratch, s)
        weights = load_model(ModelConfig(path=str(folder)), dtype=torch.float32, train=False).state_dict()
        for rows, least, most in ((64, 2000, 5000), (256, 6000, 15000)):
            rows = s.pick(rows, 4)
            count = s.pick(128, 4)
            config = TorchGeneratorConfig(max_batch=rows, dtype="float32" if s.small else "bfloat16")
            made: Any = config.build(AutoConfig.from_pretrained(folder))
            with torch.no_grad():
                made.engine.open().load(weights.items())

            async def sample(made: Any = made, rows: int = rows, count: int = count) -> None:
                params = [SamplingParams(count, seed=seed) for seed in range(rows)]
                await asyncio.gather(*(made.sample(list(range(1, 60)), param, str(param.seed)) for param in params))
                await made.close()

            begun = time.perf_counter()
            asyncio.run(sample())
            yield within(f"tokens/s, {rows} rows", rows * count / (time.perf_counter() - begun), least, most, s)


@check("C2")
def sleep(s: Setting) -> Iterator[Row]:
    """The learner's sleep and waking, a checkpoint, and its weights handed out in buckets."""
    from tests.learner.parts import PolicyGradient, some_batch, whole, worker
    from whet.weights.source import WeightRequest

    with tempfile.TemporaryDirectory() as scratch:
        made = worker(_folder(scratch, s), precision="bfloat16", learner={"device": s.device.type})
        made.update(whole(some_batch()), PolicyGradient())
        for name, work, least, most in (
            ("asleep, first time", made.sleep, 0, 3),
            ("awake, first time", made.wake, 0, 1),
            ("asleep, memory is pinned", made.sleep, 0, 0.4),
            ("awake, memory is pinned", made.wake, 0, 0.4),
        ):
            yield within(f"seconds: {name}", _timed(work, s), least, most, s)
        (saved := Path(scratch) / "saved").mkdir()
        yield within("seconds: a checkpoint", _timed(lambda: made.state.save(saved), s), 0, 15, s)
        for megabytes in (64, 512):
            request = WeightRequest(torch.bfloat16, megabytes << 20, transport=None if s.small else "cuda_ipc")

            def publish(request: WeightRequest = request) -> None:
                made.weights.begin(request)
                while made.weights.next() is not None:
                    pass
                made.weights.end()

            publish()
            yield within(f"seconds: weights in buckets of {megabytes} MiB", _timed(publish, s), 0, 0.3, s)
        made.close()


def _timed(work: Any, s: Setting) -> float:
    wait(s)
    begun = time.perf_counter()
    work()
    wait(s)
    return time.perf_counter() - begun


@check("C3")
def grpo(s: Setting) -> Iterator[Row]:
    """Steps of GRPO, with proofs of arrival: where the time goes."""
    from tests.toy import toy_recipe
    from whet.run.run import start

    with tempfile.TemporaryDirectory() as scratch:
        (model := Path(scratch) / "model").mkdir()
        recipe = toy_recipe(
            _folder(str(model), s),
            steps=s.pick(4, 1),
            learner={"precision": "float32" if s.small else "bfloat16", "max_tokens": s.pick(16384, 512)},
            generator={"dtype": "float32" if s.small else "bfloat16", "max_batch": 256, "max_context": 1024},
            rollouts={"prompts_per_step": s.pick(16, 2)},
            algorithm={"type": "grpo", "group_size": s.pick(8, 2)},
            sampling={"max_new_tokens": s.pick(256, 4), "max_prompt_tokens": 128},
            optimizer={"lr": 1e-6},
            evaluation={"enabled": False},
            checkpoints={"every": 100},
        )
        start(recipe, Path(scratch) / "run")
        lines = [json.loads(line) for line in (Path(scratch) / "run" / "metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if "time/step" in line]
        for name in ("time/generate", "time/learn", "time/publish", "time/step"):
            yield Row(f"{name}, last step", round(float(steps[-1].get(name, 0.0)), 3))


@check("C4")
def large_adapter(s: Setting) -> Iterator[Row]:
    """An 8B model with LoRA, all of it: does it fit, and how fast is it?"""
    from gpu_learning import _step, grpo_batch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Qwen3Config

    from whet.learner.model import LearnerModel
    from whet.learner.precision import keep_in_bfloat16
    from whet.models.attention.forest import use_forest_attention

    large = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    keys = {"num_key_value_heads": s.pick(8, 2), "head_dim": s.pick(128, 16), "vocab_size": s.pick(151_936, 300)}
    with s.device:
        inner = AutoModelForCausalLM.from_config(
            Qwen3Config(**(small if s.small else large), **keys), dtype=torch.float32
        )
    use_forest_attention(inner)
    whole: Any = get_peft_model(inner, LoraConfig(r=16, target_modules="all-linear"))
    keep_in_bfloat16(whole, "bfloat16")
    whole.gradient_checkpointing_enable({"use_reentrant": False})
    whole.enable_input_require_grads()
    model = LearnerModel(whole.train(), None, "bfloat16")
    model.device, model.attention = s.device, "varlen"
    tokens = s.pick(8192, 64)
    laps = [sum(_step(model, grpo_batch(tokens, seed), s)) for seed in range(s.pick(4, 1))]
    yield Row("tokens/s", round(tokens / min(laps)))
    if s.device.type == "cuda":
        yield within("peak GiB", torch.cuda.max_memory_allocated() / 2**30, 20, 95, s)
