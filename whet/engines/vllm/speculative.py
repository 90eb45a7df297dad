"""Speculative decoding on vLLM: cheap guesses of the next tokens, of which the model keeps as many as it would have
sampled itself (Leviathan et al., arXiv 2211.17192). What is sampled has the model's own distribution and log-probs."""

from abc import ABC, abstractmethod
from typing import Any

from pydantic import Field, model_validator

from whet.config import Config


class Speculative(Config, ABC):
    """Where guesses come from. Of a kind of your own, ``settings`` is vLLM's ``speculative_config``."""

    tokens: int = Field(default=4, ge=1, le=32)
    """Tokens that are guessed at a time."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return them in vLLM's words, but for the number of tokens."""


class NGram(Speculative):
    """What followed the same tokens earlier in the text. Costs nothing; helps where answers repeat their prompt."""

    longest: int = Field(default=4, ge=1)
    """Tokens that are looked for at first, then ever fewer."""
    shortest: int = Field(default=2, ge=1)
    """Fewest tokens that are looked for."""

    @model_validator(mode="after")
    def _in_order(self) -> "NGram":
        if self.shortest > self.longest:
            raise ValueError(f"shortest = {self.shortest} is more than longest = {self.longest}")
        return self

    def settings(self) -> dict[str, Any]:
        return {"method": "ngram", "prompt_lookup_max": self.longest, "prompt_lookup_min": self.shortest}


class Draft(Speculative):
    """A smaller model with the same vocabulary, which is never trained: the further the policy moves, the fewer of its
    guesses are kept."""

    model: str = Field(min_length=1)
    """Its folder, or its name on the Hub."""

    def settings(self) -> dict[str, Any]:
        return {"method": "draft_model", "model": self.model, "draft_load_config": {"load_format": "auto"}}


SPECULATIVE = {"ngram": f"{__name__}:NGram", "draft": f"{__name__}:Draft"}
"""The kinds by the name that recipes use."""
