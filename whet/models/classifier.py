"""A classifier of texts, for example of their sentiment, that scores the last reply of conversations; and the loading
of sequence classifiers, which reward models are, too. Runs in a process of the run, which
``whet.tasks.preference.reward_model_process`` starts without torch. Each text is computed alone, so that its score
depends on no other text, to the bit."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from whet.base.errors import WhetError
from whet.base.lazy import torch_dtype
from whet.base.strict_json import JsonObject
from whet.core.content import text_of
from whet.models.config import ModelConfig
from whet.models.loading import load_model_config, resolve
from whet.models.sequence_classifier import classifier_class
from whet.tasks.preference.reward_model_process import CutScore

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Settings = tuple[str, str | None, str, str, int, str | int, str]
"""The arguments of ``Classifier``."""


def load_classifier(
    model: str, revision: str | None, device: str, dtype: str, threads: int, kind: str, advice: str
) -> tuple[Path, "PreTrainedTokenizerBase", "PreTrainedModel"]:
    """Return the folder, the tokenizer and the model, and let torch compute with ``threads`` from here on. Raises
    ``WhetError`` for a model that can't be loaded, and with ``advice`` if weights are missing, so that it is not
    a ``kind``."""
    from transformers import AutoTokenizer
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()
    torch.set_num_threads(threads)
    if device == "cuda" and not torch.cuda.is_available():
        raise WhetError("device is cuda, but torch finds no GPU here; use cpu")
    config = ModelConfig(path=model, revision=revision)
    folder = resolve(config)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        loaded, info = classifier_class(load_model_config(config)).from_pretrained(
            folder, dtype=torch_dtype(dtype), use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError) as error:
        raise WhetError(f"{folder} can't be loaded as a sequence classifier: {error}") from error
    if info["missing_keys"]:
        raise WhetError(f"{folder} is not {kind}: it lacks {', '.join(sorted(info['missing_keys'])[:3])}. {advice}")
    return folder, tokenizer, loaded.to(device).eval()


class Classifier:
    """A sequence classifier of transformers, its tokenizer, and the label whose probability or logit is the score."""

    def __init__(
        self, model: str, revision: str | None, device: str, dtype: str, threads: int, label: str | int, value: str
    ) -> None:
        """Raises ``WhetError`` for a model that can't be loaded, is not a classifier, or lacks the label."""
        where = model, revision, device, dtype, threads
        folder, tokenizer, self.model = load_classifier(*where, "a classifier", "Name a model that was trained as one")
        self.tokenizer: Any = tokenizer
        config = self.model.config
        self.independent = config.num_labels == 1 or config.problem_type == "multi_label_classification"
        self.index, self.value = _index(dict(config.id2label), label, str(folder)), value
        limits = [getattr(config, "max_position_embeddings", None), self.tokenizer.model_max_length]
        self.longest = min(limit for limit in [*limits, 1_000_000] if limit)

    @torch.no_grad()
    def scores(self, conversations: list[JsonObject]) -> list[float | str]:
        """Return for each conversation (``messages`` and ``tools``) the score of its last reply: a ``CutScore`` if only
        the beginning of the reply fits the model."""
        return [self._score(text_of(conversation["messages"][-1]["content"])) for conversation in conversations]

    def _score(self, text: str) -> float | str:
        whole = len(self.tokenizer(text, truncation=False, verbose=False)["input_ids"])
        if not whole:
            return "the reply has no tokens for the classifier"
        tokens = self.tokenizer(text, truncation=True, max_length=self.longest, return_tensors="pt")
        logits = self.model(**tokens.to(self.model.device)).logits[0].double()
        if self.value == "probability":
            logits = logits.sigmoid() if self.independent else logits.softmax(-1)
        score = float(logits[self.index])
        return CutScore(score) if whole > self.longest else score


def _index(labels: dict[int, str], label: str | int, folder: str) -> int:
    """Return the number of a label, given by name or number."""
    for number, name in labels.items():
        if label in (name, number):
            return number
    names = ", ".join(f"{name} ({number})" for number, name in labels.items())
    raise WhetError(f"{folder} has no label {label!r}; its labels are {names}")


@cache
def load(*settings: *Settings) -> Classifier:
    """Return the process's classifier, which is loaded at the first call with the arguments of ``Classifier``."""
    return Classifier(*settings)


def scores(settings: Settings, conversations: list[dict[str, object]]) -> list[float | str | list[float]]:
    """Return the scores by the classifier of these settings; a ``CutScore`` as a list of one number, because only plain
    values pass between processes."""
    results = load(*settings).scores(conversations)
    return [[float(score)] if isinstance(score, CutScore) else score for score in results]
