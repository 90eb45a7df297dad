"""Settings of guessed tokens (speculative decoding; Leviathan et al., arXiv 2211.17192) that engines have in common."""

from pydantic import Field, model_validator

from whet.config import Config


class Guesses(Config):
    """A source of guesses of the next tokens, which the model verifies together: it keeps the ones that it
    would have sampled."""

    tokens: int = Field(default=4, ge=1, le=32)
    """Number of tokens that are guessed at a time."""


class NGram(Guesses):
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
