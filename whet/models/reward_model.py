"""A reward model that scores conversations, also with images. Runs in a separate process, which
``whet.tasks.preference.reward_model_process`` starts without torch. Answers to one prompt form one forest, so that the
prompt, with its images, is computed once."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from whet.base.errors import DataError, WhetError
from whet.base.strict_json import JsonObject
from whet.chat.chat_template import ChatTemplate
from whet.chat.control_tokens import ControlTokens
from whet.chat.renderer import with_images
from whet.chat.turns import render_contents
from whet.core.batch import Batch
from whet.core.content import image_urls, only_images, text_of
from whet.core.types import Episode, Group, Message, Span, Task, Trajectory
from whet.models.attention.forest import forest_hidden, supports_forest, use_forest_attention
from whet.models.classifier import load_classifier
from whet.models.config import ModelConfig
from whet.models.families import PICTURE
from whet.models.images import embedded
from whet.models.loading import load_images
from whet.models.sequence_classifier import arguments_of, reads_images, trial_rows
from whet.tasks.preference.reward_model_process import CutScore


@dataclass(slots=True, frozen=True)
class _Row:
    tokens: list[int]
    messages: list[Message]  # whose images the tokens have
    cut: bool = False  # its replies were cut


class RewardModel:
    """A sequence classifier with one label, its tokenizer and its chat template."""

    def __init__(self, model: str, revision: str | None, device: str, dtype: str, threads: int) -> None:
        """Raises ``WhetError`` for a model that can't be loaded, or is not a reward model."""
        advice = "Name the folder that `whet export` wrote from a reward model's run"
        where = model, revision, device, dtype, threads
        folder, tokenizer, self.model = load_classifier(*where, "a reward model", advice)
        self.tokenizer: Any = tokenizer
        head = getattr(self.model, "score", None)
        if type(head) is not torch.nn.Linear or head.out_features != 1:
            raise WhetError(f"{folder} is not a reward model: its head must be one linear map, 'score', to one number")
        if not self.tokenizer.chat_template:
            raise WhetError(f"{folder}: the tokenizer has no chat template, so conversations can't be rendered")
        self.chat = ChatTemplate(self.tokenizer, self.tokenizer.chat_template, {}, tools_as_text=False)
        self.control = ControlTokens(self.tokenizer, self.chat.text)
        self.images = load_images(ModelConfig(path=str(folder))) if reads_images(self.model.config) else None
        text = self.model.config.get_text_config()
        self.padding: int | None = text.pad_token_id
        self.longest: int | None = getattr(text, "max_position_embeddings", None)
        self._select_attention(folder)

    @torch.no_grad()
    def scores(self, conversations: list[JsonObject]) -> list[float | str]:
        """Return for each conversation (``messages`` and ``tools``) its score, a ``CutScore`` if its replies had to be
        cut, or the reason why it has none."""
        results: list[float | str] = [""] * len(conversations)
        prompts: dict[str, dict[int, _Row]] = {}
        for index, conversation in enumerate(conversations):
            try:
                row = self._fitting(**conversation)
            except DataError as error:
                results[index] = f"the reward model can't read the conversation: {error}"
            else:
                distinct = index if row.cut else None  # its earlier replies are cut as well
                prompt = json.dumps([distinct, conversation["messages"][:-1], conversation["tools"]])
                prompts.setdefault(prompt, {})[index] = row
        if prompts:
            scores = self._read([list(rows.values()) for rows in prompts.values()])
            scored = [(index, row.cut) for rows in prompts.values() for index, row in rows.items()]
            for (index, cut), score in zip(scored, scores, strict=True):
                results[index] = CutScore(score) if cut else score
        return results

    def _fitting(self, messages: list[Message], tools: list[JsonObject] | None) -> _Row:
        """Return the tokens of a conversation, shortened to fit the model. The replies are then cut to the largest
        common length that fits, each with its proper end, so that a reply that is too long is judged by its beginning.
        Raises ``DataError`` if the rest alone is too long."""
        if self.images is None and image_urls(messages):
            raise DataError("it has an image, and the reward model reads texts only; train one with model.vision")
        tokens = self._tokens(messages, tools)
        if self.longest is None or len(tokens) <= self.longest:
            return _Row(tokens, messages)
        fitting = None
        replies = [text_of(message["content"]) for message in messages if message["role"] == "assistant"]
        fits, too_long = -1, 1 + max(map(len, replies), default=0)
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            tried = self._tokens([_cut(message, middle) for message in messages], tools)
            if len(tried) <= self.longest:
                fits, fitting = middle, tried
            else:
                too_long = middle
        if fitting is None:
            raise DataError(
                f"it has {len(tokens)} tokens, the model reads at most {self.longest}, and without the replies it is "
                "still too long: lower sampling.max_prompt_tokens or max_observation_tokens"
            )
        return _Row(fitting, messages, cut=True)

    def _tokens(self, messages: list[Message], tools: list[JsonObject] | None) -> list[int]:
        """Return the tokens of a conversation as the learner's renderer writes it (``Renderer.render_whole``)."""

        def render(messages: Sequence[Message]) -> str:
            return self.control.render(self.chat.apply, *self.chat.written(messages, tools))

        written = render_contents(self.control, render, messages, self.images is not None)
        tokens = with_images(self.control.encode(written), messages, self.images)
        while len(tokens) > 1 and tokens[-1] == self.padding:  # a classifier uses the last token that isn't padding
            tokens.pop()
        return tokens

    def _read(self, groups: list[list[_Row]]) -> list[float]:
        """Return the scores of token rows, in groups with a shared prefix. Each row is followed by a dummy token whose
        predictor is the row's last token, as in training."""
        made = []
        for number, rows in enumerate(groups):
            spans = [[Span(row.tokens, False), Span(row.tokens[-1:], True)] for row in rows]
            episodes = [Episode([Trajectory(of, row.messages)]) for of, row in zip(spans, rows, strict=True)]
            made.append(Group(str(number), Task("", []), episodes))
        batch = Batch.from_groups(made, share_prompts=self.forest)
        inputs = embedded(self.model, batch, self.images) if self.images is not None and batch.images else None
        hidden = forest_hidden(self.model, batch, embedded=inputs)
        last = hidden[batch.predictor[batch.trained_tokens].to(hidden.device)]
        head = self.model.score
        bias = None if head.bias is None else head.bias.float()
        scores: list[float] = torch.nn.functional.linear(last.float(), head.weight.float(), bias)[:, 0].tolist()
        return scores

    @torch.no_grad()
    def _select_attention(self, folder: Path) -> None:
        """Select forest attention if the architecture supports it. Raises ``WhetError`` if the model's score is not
        finite, or forest attention or the head gives another one than the unmodified model."""
        rows, device = trial_rows(self.model.config, self.images), self.model.device
        expected = []
        for row in rows:
            inputs = {name: value.to(device) for name, value in arguments_of(row, self.images).items()}
            expected.append(float(self.model(**inputs, use_cache=False).logits[0, 0]))
        if not all(map(math.isfinite, expected)):
            raise WhetError(f"{folder} can't be used as a reward model: {_why_not_finite(self.model, expected)}")
        self.forest = supports_forest(self.model.config)
        if self.forest:
            use_forest_attention(self.model)
        scores = self._read([[_Row(row, only_images([PICTURE]))] for row in rows])
        tolerance = 1e-3 if self.model.dtype == torch.float32 else 0.05
        for score, theirs in zip(scores, expected, strict=True):
            if not abs(score - theirs) <= tolerance * (1 + abs(theirs)):
                raise WhetError(
                    f"{type(self.model).__name__} scores {theirs:.6g}, but its head on its last hidden state gives "
                    f"{score:.6g}; this architecture can't be used as a reward model yet"
                )


def _why_not_finite(model: torch.nn.Module, scores: list[float]) -> str:
    damaged = [name for name, weight in model.named_parameters() if not weight.isfinite().all()]
    if damaged:
        return f"{len(damaged)} of its weights hold NaN or infinite numbers, as in {damaged[0]}; export it again"
    return f"it scores {scores[0]:g}, because its weights are too large for {getattr(model, 'dtype', 'its dtype')}"


def _cut(message: Message, characters: int) -> Message:
    """Return the message; for a reply, the beginning of its text, without thoughts and calls."""
    if message["role"] != "assistant":
        return message
    return {"role": "assistant", "content": text_of(message["content"])[:characters]}


@cache
def load(model: str, revision: str | None, device: str, dtype: str, threads: int) -> RewardModel:
    """Return the process's reward model, which is loaded at the first call."""
    return RewardModel(model, revision, device, dtype, threads)


def scores(settings: tuple[object, ...], conversations: list[JsonObject]) -> list[float | str | list[float]]:
    """Return the scores by the model of these settings, the arguments of ``load``. A ``CutScore`` is passed as a list
    of one number, because only plain values pass between processes."""
    results = load(*settings).scores(conversations)
    return [[float(score)] if isinstance(score, CutScore) else score for score in results]
