"""The settings of a teacher: a model that is asked and never trained."""

from pydantic import Field

from whet.models.config import ModelConfig

COLUMNS = frozenset({"topk_ids", "teacher_logprobs", "teacher_token_logprobs"})
"""What teachers can fill: their likeliest tokens [N, K] with the log-probs of these, and the log-probs of the tokens
that are there [N]."""


class Teacher(ModelConfig):
    """A folder, such as the export of another run, or a Hub id."""

    path: str
    """The folder or Hub id."""
    lora: None = None
    """Teachers have no adapters of their own."""
    weight: float = Field(1.0, gt=0)
    """Its share where several teachers are mixed."""
    chat_template: str | None = None
    """Replaces its own chat template, where it has another tokenizer than the student."""
