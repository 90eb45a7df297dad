"""A teacher behind a server of vLLM or SGLang, which gives log-probs of a prompt's tokens and the most likely tokens at
each of its positions.

A server gives log-probs at temperature 1, without filters. ``score`` has the same results as a learner with the same
model, up to the rounding of the server's dtype.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from whet.base.addresses import key_in
from whet.base.closing import gather_or_cancel
from whet.base.errors import ConfigError, DataError, GeneratorError
from whet.core.batch import Batch
from whet.core.types import Distribution
from whet.distillation.teacher import Teacher, TeacherServer
from whet.distillation.vocabulary import rows_of, tokenizer_of
from whet.engines.server.client import Client, RefusedError, Scored, Scoring, check_tokenizer
from whet.engines.server.sglang_api import SglangApi
from whet.engines.server.vllm_api import VllmApi
from whet.learner.base import Top
from whet.models.config import ModelConfig

_START = "start vLLM as in: vllm serve MODEL --max-logprobs {k}"
_ROUNDING = 1e-3  # nats by which a log-prob may be above 0


@dataclass(slots=True, frozen=True)
class ServedFacts:
    """See ``ScorerFacts``."""

    model: ModelConfig
    vocabulary: int  # rows of the model's output matrix, by its config
    forest: bool = True


class ServerTeacher:
    """A ``Scorer``. Open one with ``open``, in the event loop that uses it."""

    def __init__(self, name: str, settings: Teacher, server: TeacherServer, client: Client) -> None:
        self.name, self.settings = name, settings
        self.facts = ServedFacts(settings, rows_of(settings))
        self._client = client
        self.vllm = server.protocol == "vllm"
        self._api: Scoring = (VllmApi if self.vllm else SglangApi)(client, server.model)
        self._room = asyncio.Semaphore(server.requests)

    @classmethod
    @asynccontextmanager
    async def open(cls, name: str, settings: Teacher, server: TeacherServer) -> AsyncIterator[Self]:
        """Connect to a server, and find the model on it. Raises ``ConfigError`` if it lacks the model, and
        ``GeneratorError`` if it gives no answer."""
        section = f"algorithm.teachers.{name}.server"
        client = Client(server.url, key_in(server.api_key_env, f"{section}.api_key_env"), server.deadline, section)
        try:
            teacher = cls(name, settings, server, client)
            await teacher._api.find(None, "")
            yield teacher
        finally:
            await client.close()

    async def check(self, k: int, rows: int, longest: int | None) -> None:
        """Raise ``ConfigError`` unless the server has the teacher's tokens and vocabulary, gives ``k`` most likely
        tokens among the first ``rows``, and takes texts of ``longest`` tokens."""
        url, tokenizer = self._client.url, tokenizer_of(self.settings)
        if longest is not None:
            # It samples one token, which is thrown away.
            await self._api.find(longest + 1, "sampling.max_prompt_tokens + max_new_tokens + 1")
        await check_tokenizer(self._api, self._client, tokenizer, f"algorithm.teachers.{self.name}.path")
        k = max(k, 1)
        asked, last = self._asked(k, rows), self.facts.vocabulary - 1
        try:
            (scores,) = await self._api.score([last, last], 1, asked)
        except (RefusedError, GeneratorError) as error:
            raise ConfigError(
                f"{self._client.section}: {url} gives no log-probs of a prompt with the last of the {last + 1} tokens "
                f"of {self.settings.path}, with {asked} most likely tokens; {_START.format(k=asked)}. Its answer: "
                f"{error}"
            ) from None
        if self.vllm and await self._accepts(last + 1):  # SGLang does not look at token numbers
            raise ConfigError(
                f"{self._client.section}: {url} serves a model with more tokens than {self.settings.path}, which has "
                f"{last + 1}; serve the same model"
            )
        values = [scores.logprob, *(value for _, value in scores.top)]
        if max(values) > _ROUNDING:
            raise ConfigError(
                f"{self._client.section}: {url} reports {max(values):.3g} as a log-prob, so these are logits; start "
                "vLLM without --logprobs-mode"
            )
        self._top(scores, k, rows, asked)

    async def _accepts(self, token: int) -> bool:
        try:
            await self._api.score([token, token], 1, 0)
        except RefusedError:
            return False
        return True

    async def score(self, batch: Batch, columns: Set[str], top: Top | None = None) -> dict[str, Tensor]:
        """See ``Scorer``. Columns: ``logprobs``; with ``top`` also ``topk`` and ``topk_ids``. The batch's distribution
        must have temperature 1 and no filter."""
        if batch.distribution != Distribution():
            raise DataError(
                f"a teacher behind a server has log-probs at temperature 1 only, not under {batch.distribution}"
            )
        if not columns <= ({"logprobs"} if top is None else {"logprobs", "topk", "topk_ids"}):
            raise DataError(f"a teacher behind a server can't give the columns {sorted(columns)} of a batch")
        k, rows = (0, 0) if top is None else (top.k, top.below)
        asked = self._asked(k, rows) if k else 0
        logprobs = torch.zeros(len(batch))
        ids, values = torch.zeros(len(batch), k, dtype=torch.long), torch.zeros(len(batch), k)
        paths = batch.paths()
        places = [(path, batch.trained[path].nonzero().squeeze(1).tolist()) for path in paths if len(path)]
        # The first token of a text is not predicted.
        scored_texts = [(path, [i for i in trained if i]) for path, trained in places if any(trained)]
        requests = [self._scores(batch.tokens[path].tolist(), trained, asked) for path, trained in scored_texts]
        for (path, trained), scores in zip(scored_texts, await gather_or_cancel(requests), strict=True):
            at = path[trained]
            logprobs[at] = torch.tensor([each.logprob for each in scores]).clamp(max=0)
            if k:
                best = [self._top(each, k, rows, asked) for each in scores]
                ids[at] = torch.tensor([[token for token, _ in each] for each in best])
                values[at] = torch.tensor([[value for _, value in each] for each in best]).clamp(max=0)
        scored = {"logprobs": logprobs, "topk_ids": ids, "topk": values}
        return {name: scored[name] for name in columns}

    async def _scores(self, tokens: list[int], at: list[int], k: int) -> list[Scored]:
        """Return the scores of the tokens at ascending positions, none of which is 0."""
        async with self._room:
            scores = await self._api.score(tokens[: at[-1] + 1], at[0], k)
        for each in scores:
            values = [each.logprob, *(value for _, value in each.top)]
            if not math.isfinite(each.logprob) or not all(value <= _ROUNDING for value in values):  # NaN is not
                raise GeneratorError(
                    f"{self._client.section}: {self._client.url} gave the log-probs {values[:5]} of a token, of which "
                    "none can be above 0 or NaN"
                )
        return [scores[position - at[0]] for position in at]

    def _asked(self, k: int, rows: int) -> int:
        """Return how many tokens to ask for, so that at least ``k`` of them are among the first ``rows``."""
        return min(k + max(0, self.facts.vocabulary - rows), self.facts.vocabulary)

    def _top(self, scores: Scored, k: int, rows: int, asked: int) -> list[tuple[int, float]]:
        """Return the ``k`` most likely tokens among the first ``rows``. Raises ``GeneratorError`` if the answer is not
        one of the teacher's model."""
        top = [(token, value) for token, value in scores.top if token < rows][:k]
        if len(scores.top) != asked or len(top) != k or any(token >= self.facts.vocabulary for token, _ in scores.top):
            largest = max((token for token, _ in scores.top), default=0)
            raise GeneratorError(
                f"{self._client.section}: {self._client.url} was asked for {asked} most likely tokens of a model with "
                f"{self.facts.vocabulary} and gave {len(scores.top)}, up to number {largest}; it must serve the model "
                f"{self.settings.path}"
            )
        return top
