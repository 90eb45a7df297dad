"""A reward model that scores conversations. Runs in a separate process, which
``whet.tasks.preference.reward_model_process`` starts without torch. Answers to one prompt form one forest, so that the
prompt is computed once."""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from whet.base.errors import DataError, WhetError
from whet.base.strict_json import JsonObject
from whet.chat.control_tokens import ControlTokens
from whet.chat.turns import render_contents
from whet.core.batch import Batch
from whet.core.content import text_of
from whet.core.types import Episode, Group, Message, Span, Task, Trajectory
from whet.models.attention.forest import forest_hidden, supports_forest, use_forest_attention
from whet.models.classifier import load_classifier
from whet.tasks.preference.reward_model_process import CutScore


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
        self.control = ControlTokens(self.tokenizer, self.tokenizer.chat_template)
        text = self.model.config.get_text_config()
        self.padding: int | None = text.pad_token_id
        self.longest: int | None = getattr(text, "max_position_embeddings", None)
        self._select_attention(text.vocab_size)

    @torch.no_grad()
    def scores(self, conversations: list[JsonObject]) -> list[float | str]:
        """Return for each conversation (``messages`` and ``tools``) its score, a ``CutScore`` if its replies had to be
        cut, or the reason why it has none."""
        results: list[float | str] = [""] * len(conversations)
        cut = [False] * len(conversations)
        prompts: dict[str, dict[int, list[int]]] = {}
        for index, conversation in enumerate(conversations):
            try:
                tokens, cut[index] = self._fitting(**conversation)
            except DataError as error:
                results[index] = str(error)
            else:
                distinct = index if cut[index] else None  # its earlier replies are cut as well
                prompt = json.dumps([distinct, conversation["messages"][:-1], conversation["tools"]])
                prompts.setdefault(prompt, {})[index] = tokens
        if prompts:
            scores = self._read([list(rows.values()) for rows in prompts.values()])
            for index, score in zip([index for rows in prompts.values() for index in rows], scores, strict=True):
                results[index] = CutScore(score) if cut[index] else score
        return results

    def _fitting(self, messages: list[Message], tools: list[object] | None) -> tuple[list[int], bool]:
        """Return the tokens of a conversation, shortened to fit the model, and whether it was shortened. The replies
        are then cut to the largest common length that fits, each with its proper end, so that a reply that is too long
        is judged by its beginning. Raises ``DataError`` if the rest alone is too long."""
        tokens = self._tokens(messages, tools)
        if self.longest is None or len(tokens) <= self.longest:
            return tokens, False
        fitting = None
        fits, too_long = -1, 1 + max(len(text_of(message["content"])) for message in messages)
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            tried = self._tokens([_cut(message, middle) for message in messages], tools)
            if len(tried) <= self.longest:
                fits, fitting = middle, tried
            else:
                too_long = middle
        if fitting is None:
            raise DataError(
                f"the conversation has {len(tokens)} tokens, the reward model reads at most {self.longest}, and "
                "without the replies it is still too long: lower sampling.max_prompt_tokens or max_observation_tokens"
            )
        return fitting, True

    def _tokens(self, messages: list[Message], tools: list[object] | None) -> list[int]:
        from jinja2 import TemplateError

        def write(messages: list[Message], tools: list[object] | None) -> str:
            try:
                text: str = self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
            except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
                raise DataError(f"the reward model's chat template can't render the conversation: {error}") from error
            return text

        def render(messages: Sequence[Message]) -> str:
            return self.control.render(write, list(messages), tools)

        tokens = self.control.encode(render_contents(self.control, render, messages))
        while len(tokens) > 1 and tokens[-1] == self.padding:  # a classifier uses the last token that isn't padding
            tokens.pop()
        return tokens

    def _read(self, groups: list[list[list[int]]]) -> list[float]:
        """Return the scores of token rows, in groups with a shared prefix. Each row is followed by a dummy token whose
        predictor is the row's last token, as in training."""
        made = []
        for number, rows in enumerate(groups):
            episodes = [Episode([Trajectory([Span(row, False), Span(row[-1:], True)])]) for row in rows]
            made.append(Group(str(number), Task("", []), episodes))
        batch = Batch.from_groups(made, share_prompts=self.forest)
        last = forest_hidden(self.model, batch)[batch.predictor[batch.trained_tokens].to(self.model.device)]
        head = self.model.score
        bias = None if head.bias is None else head.bias.float()
        scores: list[float] = torch.nn.functional.linear(last.float(), head.weight.float(), bias)[:, 0].tolist()
        return scores

    @torch.no_grad()
    def _select_attention(self, vocabulary: int) -> None:
        """Select forest attention if the architecture supports it. Raises ``WhetError`` if forest attention or the head
        gives a different score than the unmodified model."""
        tokens = [token % vocabulary for token in (1, 2, 3) if token % vocabulary != self.padding]
        expected = float(self.model(torch.tensor([tokens], device=self.model.device), use_cache=False).logits[0, 0])
        self.forest = supports_forest(self.model.config)
        if self.forest:
            use_forest_attention(self.model)
        (score,) = self._read([[tokens]])
        tolerance = 1e-3 if self.model.dtype == torch.float32 else 0.05
        if not abs(score - expected) <= tolerance * (1 + abs(expected)):
            raise WhetError(
                f"{type(self.model).__name__} scores {expected:.6g}, but its head on its last hidden state gives "
                f"{score:.6g}; this architecture can't be used as a reward model yet"
            )


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
