"""A reward model in a process of its own: conversations come in, scores go out. Started by ``whet.environments.judge``,
which knows no torch. Knows no task and no reward."""

import json
import traceback
from typing import Any

import torch

from whet.environments.child_process import to_parent
from whet.errors import DataError, WhetError
from whet.models.config import ModelConfig
from whet.models.loading import resolve


class Judge:
    """A sequence classifier with one label, and its tokenizer with its chat template."""

    def __init__(self, model: str, revision: str | None, device: str, dtype: str, threads: int) -> None:
        """Raises ``WhetError`` for a model that can't be loaded, or is no reward model."""
        from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar, set_verbosity_error

        disable_progress_bar()
        set_verbosity_error()
        torch.set_num_threads(threads)
        if device == "cuda" and not torch.cuda.is_available():
            raise WhetError("device is cuda, and torch finds no GPU here; use cpu")
        folder = resolve(ModelConfig(path=model, revision=revision))
        try:
            config = AutoConfig.from_pretrained(folder)
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
            self.model, info = AutoModelForSequenceClassification.from_pretrained(
                folder, dtype=getattr(torch, dtype), use_safetensors=True, output_loading_info=True
            )
        except (OSError, ValueError) as error:
            raise WhetError(f"{folder} can't be loaded as a sequence classifier: {error}") from error
        if info["missing_keys"]:
            raise WhetError(
                f"{folder} is no reward model: it lacks {', '.join(sorted(info['missing_keys'])[:3])}. "
                "Name the folder that `whet export` wrote from a reward model's run"
            )
        if config.num_labels != 1:
            raise WhetError(f"{folder} has {config.num_labels} labels; a reward model has one")
        if not self.tokenizer.chat_template:
            raise WhetError(f"{folder}: the tokenizer has no chat template, so conversations can't be written for it")
        self.model.to(device).eval()
        text = self.model.config.get_text_config()
        self.padding: int | None = text.pad_token_id
        self.longest: int | None = getattr(text, "max_position_embeddings", None)

    @torch.no_grad()
    def scores(self, conversations: list[dict[str, Any]]) -> list[float | str]:
        """The score of each conversation (``messages`` and ``tools``), or why it has none. They are one batch."""
        found: list[float | str] = [""] * len(conversations)
        rows: dict[int, list[int]] = {}
        for index, conversation in enumerate(conversations):
            try:
                rows[index] = self._tokens(**conversation)
            except DataError as error:
                found[index] = str(error)
        batches = [list(rows)] if self.padding is not None and rows else [[index] for index in rows]
        for batch in batches:
            for index, score in zip(batch, self._batch([rows[index] for index in batch]), strict=True):
                found[index] = score
        return found

    def _tokens(self, messages: list[Any], tools: list[Any] | None) -> list[int]:
        from jinja2 import TemplateError

        try:
            tokens: list[int] = self.tokenizer.apply_chat_template(messages, tools=tools, return_dict=False)
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise DataError(f"the reward model's chat template can't render the conversation: {error}") from error
        if self.longest is not None and len(tokens) > self.longest:
            raise DataError(f"the conversation has {len(tokens)} tokens, the reward model reads at most {self.longest}")
        return tokens

    def _batch(self, rows: list[list[int]]) -> list[float]:
        width = max(map(len, rows))
        tokens = torch.tensor([row + [self.padding or 0] * (width - len(row)) for row in rows])
        real = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        device = self.model.device
        logits = self.model(input_ids=tokens.to(device), attention_mask=real.to(device), use_cache=False).logits
        scores: list[float] = logits[:, 0].float().tolist()
        return scores


def serve() -> None:
    """The process's life: load the model, then answer requests until standard input closes."""
    receive, reply = to_parent()
    settings = receive()
    if settings is None:
        return
    try:
        judge = Judge(**json.loads(settings))
    except Exception as error:
        reply(error=str(error) if isinstance(error, WhetError) else traceback.format_exc(limit=-5))
        return
    reply(ready=True)
    while (request := receive()) is not None:
        try:
            reply(scores=judge.scores(json.loads(request)))
        except Exception:
            reply(error=traceback.format_exc(limit=-5))
