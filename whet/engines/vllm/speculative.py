"""Speculative decoding on vLLM: cheap guesses of the next tokens, of which the model accepts as many as agree with its
own sampling (Leviathan et al., arXiv 2211.17192). The samples have the model's distribution and log-probs."""

from abc import ABC, abstractmethod
from typing import Any

from pydantic import Field, field_validator, model_validator

from whet.config import Config
from whet.fetch.model import absolute_path


class Speculative(Config, ABC):
    """The source of guesses. In a subclass, ``settings`` is vLLM's ``speculative_config``."""

    tokens: int = Field(default=4, ge=1, le=32)
    """Number of tokens that are guessed at a time."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return vLLM's settings, without the number of tokens."""


class NGram(Speculative):
    """Guesses the tokens that followed the same tokens earlier in the text. Costs nothing; helps if answers repeat
    their prompt."""

    longest: int = Field(default=4, ge=1)
    """Number of tokens that are searched for first, then gradually fewer."""
    shortest: int = Field(default=2, ge=1)
    """Minimum number of tokens that are searched for."""

    @model_validator(mode="after")
    def _in_order(self) -> "NGram":
        if self.shortest > self.longest:
            raise ValueError(f"shortest = {self.shortest} is more than longest = {self.longest}")
        return self

    def settings(self) -> dict[str, Any]:
        return {"method": "ngram", "prompt_lookup_max": self.longest, "prompt_lookup_min": self.shortest}


class Draft(Speculative):
    """A smaller model with the same vocabulary, which is not trained: the further the policy moves, the fewer of its
    guesses are accepted."""

    model: str = Field(min_length=1)
    """The draft model's folder, its name on the Hub, or an artifact."""

    @field_validator("model")
    @classmethod
    def _absolute(cls, model: str) -> str:
        return absolute_path(model)

    def settings(self) -> dict[str, Any]:
        return {"method": "draft_model", "model": self.model, "draft_load_config": {"load_format": "auto"}}


SPECULATIVE = {"ngram": f"{__name__}:NGram", "draft": f"{__name__}:Draft"}
"""The kinds by their names in recipes."""
