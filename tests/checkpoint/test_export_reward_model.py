"""An exported reward model is a plain sequence classifier: transformers alone gives the learner's scores."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import GPT2Config, GPT2LMHeadModel, GraniteConfig, GraniteForCausalLM, PreTrainedTokenizerFast

from tests.checkpoint.without_whet import run_without_whet
from tests.groups import episode
from tests.tiny import VOCAB, tiny_gemma, tiny_llama, tiny_qwen3, tiny_tokenizer
from whet.base.errors import ConfigError, WhetError
from whet.base.files import load_tensors
from whet.chat.renderer import Renderer
from whet.checkpoint.export import export
from whet.checkpoint.policy import load_policy
from whet.checkpoint.store import Checkpoint, CheckpointStore
from whet.config import dump_yaml
from whet.core.batch import Batch
from whet.core.types import Group, Message, Task
from whet.data.rows import judged
from whet.learner.config import LearnerConfig, WorkerConfig
from whet.learner.optimizer_config import OptimizerConfig
from whet.learner.worker import LearnerWorker
from whet.losses.reward_model import sequence_scores
from whet.models.config import LoraSettings, ModelConfig
from whet.models.reward_model import RewardModel

CONVERSATIONS: list[list[Message]] = [
    [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}],
    [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "it is \\boxed{5}, I am sure of that\n"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "and now?"},
        {"role": "assistant", "content": "bye, " * 20},
    ],
]

# Prints for each folder the scores of the conversations, one by one and as a padded batch.
READER = """
import torch, transformers

results = []
for folder in json.loads(sys.argv[1]):
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype="auto").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    render = lambda talks, **how: tokenizer.apply_chat_template(talks, return_tensors="pt", return_dict=True, **how)
    talks = json.loads(sys.argv[2])
    with torch.no_grad():
        alone = [model(**render([talk])).logits[0, 0].item() for talk in talks]
        together = model(**render(talks, padding=True)).logits[:, 0].tolist()
    config = model.config
    results.append({"alone": alone, "together": together, "labels": config.num_labels, "problem": config.problem_type})
print(json.dumps(results))
"""


def read_back(*exported: Path) -> list[dict[str, Any]]:
    folders = [str(folder) for folder in exported]
    results: list[dict[str, Any]] = run_without_whet(READER, folders, CONVERSATIONS, folder=exported[0])
    return results


def make_run(
    folder: Path, base: Any, *, tokenizer: Any = None, template: str | None = None, lora: LoraSettings | None = None
) -> tuple[Path, list[float]]:
    """Return (a run with one checkpoint of a reward model, saved by a real learner; the learner's scores)."""
    tokenizer = tokenizer or tiny_tokenizer()
    base.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    model = ModelConfig(path=str(folder / "base"), lora=lora)
    learner = LearnerConfig(matmul_precision="highest")
    worker = LearnerWorker(WorkerConfig(model=model, learner=learner, optimizer=OptimizerConfig(), head="value"))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in worker.module.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    run = folder / "run"
    run.mkdir()
    recipe = {"steps": 1, "model": model.model_dump(mode="json"), "algorithm": {"type": "reward_model"}}
    (run / "recipe.yaml").write_text(dump_yaml(recipe | {"chat_template": template}))

    def write(staging: Path) -> None:
        (staging / "reward_model").mkdir()
        worker.state.save(staging / "reward_model")

    asyncio.run(CheckpointStore(run / "checkpoints").save(1, write, {}))
    group = Group("g", Task("t", []), [episode([], messages=messages) for messages in CONVERSATIONS])
    batch = Batch.from_groups([judged(group, Renderer(tokenizer, template))])
    worker.model.eval()
    with torch.no_grad():
        scores = sequence_scores(worker.module(batch, frozenset({"values"})), batch)
    assert scores.std() > 0.01
    return run, scores.tolist()


def tokenizer_that_ends_in_padding() -> Any:
    """Return a tokenizer whose padding token also ends turns, with a template that ends in it."""
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = "<|im_end|>"
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>\n", "<|im_end|>")
    return tokenizer


def test_transformers_gives_the_scores_of_the_learner_alone_and_in_a_batch(tmp_path: Path) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "untied": {"base": tiny_llama()},
        "tied": {"base": tiny_qwen3()},
        "sliding window": {"base": tiny_gemma()},
        "lora": {"base": tiny_llama(), "lora": LoraSettings(rank=4)},
        "another template": {"base": tiny_llama(), "template": "plain"},
        "ends in its padding": {"base": tiny_llama(), "tokenizer": tokenizer_that_ends_in_padding()},
    }
    expected, folders = [], []
    for name, settings in kinds.items():
        (tmp_path / name).mkdir()
        run, scores = make_run(tmp_path / name, **settings)
        folders.append(tmp_path / name / "out")
        assert export(run, folders[-1]).step == 1
        config = (folders[-1] / "config.json").read_text()
        assert not any(word in config for word in ("forest", "whet", str(tmp_path)))
        expected.append(scores)
    for name, result, scores in zip(kinds, read_back(*folders), expected, strict=True):
        assert result["alone"] == pytest.approx(scores, abs=1e-5), name
        assert result["together"] == pytest.approx(scores, abs=1e-5), name
        assert (result["labels"], result["problem"]) == (1, "regression")
    assert "AutoModelForSequenceClassification" in (folders[0] / "README.md").read_text()


@pytest.mark.slow
def test_the_dtype_is_the_base_models(tmp_path: Path) -> None:
    run, scores = make_run(tmp_path, tiny_llama(dtype=torch.bfloat16))
    export(run, tmp_path / "out")
    written = load_tensors(tmp_path / "out" / "model.safetensors").values()
    assert {tensor.dtype for tensor in written} == {torch.bfloat16}
    (result,) = read_back(tmp_path / "out")
    assert result["alone"] == pytest.approx(scores, abs=0.05)


def test_refused_exports_leave_no_folder(tmp_path: Path) -> None:
    (tmp_path / "lora").mkdir()
    run, _ = make_run(tmp_path / "lora", tiny_llama(), lora=LoraSettings(rank=4))
    with pytest.raises(ConfigError, match="not in the adapter"):
        export(run, tmp_path / "out", adapter_only=True)

    (tmp_path / "no padding").mkdir()
    words = Tokenizer(models.WordLevel({"x": 0, "[END]": 1}, unk_token="x"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="[END]")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}[END]{% endfor %}"
    run, _ = make_run(tmp_path / "no padding", tiny_llama(), tokenizer=tokenizer)
    with pytest.raises(WhetError, match="none is left for padding"):
        export(run, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lora", "no padding"]


@pytest.mark.slow
def test_an_architecture_with_learned_positions_is_exported(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, n_positions=512)
    torch.manual_seed(0)
    run, scores = make_run(tmp_path, GPT2LMHeadModel(config))
    export(run, tmp_path / "out")
    (result,) = read_back(tmp_path / "out")
    assert result["alone"] == pytest.approx(scores, abs=1e-5)


@pytest.mark.slow
def test_an_architecture_without_a_classifier_in_transformers_is_loaded_by_the_code_of_its_card(tmp_path: Path) -> None:
    config = GraniteConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, embedding_multiplier=3.0, logits_scaling=2.0, pad_token_id=256,
    )  # fmt: skip
    torch.manual_seed(0)
    run, scores = make_run(tmp_path, GraniteForCausalLM(config))
    exported = export(run, tmp_path / "out").path
    (code,) = re.findall(r"```python\n(.*?)```", (exported / "README.md").read_text(), re.DOTALL)
    assert "class GraniteForSequenceClassification(GenericForSequenceClassification" in code
    talk = (
        f"conversation = json.loads(sys.argv[1])\ntokens = tokenizer.apply_chat_template(conversation, {_AS_TENSORS})"
    )
    script = f"{code.replace('path/to/this/folder', str(exported))}\n{talk}\nprint(model(**tokens).logits[0, 0].item())"
    found = [run_without_whet(script, talk, folder=tmp_path) for talk in CONVERSATIONS]
    assert found == pytest.approx(scores, abs=1e-5)
    served = RewardModel(str(exported), None, "cpu", "float32", 1)
    assert served.scores([{"messages": talk, "tools": None} for talk in CONVERSATIONS]) == pytest.approx(
        scores, abs=1e-5
    )


_AS_TENSORS = 'return_tensors="pt", return_dict=True'


def test_a_checkpoint_without_a_policy_is_refused_with_the_model_that_it_has(tmp_path: Path) -> None:
    (tmp_path / "reward_model").mkdir()
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(WhetError, match=r"has no policy; it has reward_model$"):
        load_policy(Checkpoint(tmp_path, 1, {}, None), ModelConfig())
