"""The settings of a teacher, a model that is not trained."""

from pydantic import Field

from whet.chat.template_file import ChatTemplate
from whet.models.config import ModelConfig

COLUMNS = frozenset({"topk_ids", "teacher_logprobs", "teacher_token_logprobs"})
"""The columns that teachers fill: their most likely tokens [N, K] with the log-probs of these, and the log-probs of the
given tokens [N]."""


class Teacher(ModelConfig):
    """A folder, such as the export of another run, or a Hub id."""

    path: str
    """The folder or Hub id."""
    lora: None = None
    """Teachers have no adapters."""
    weight: float = Field(1.0, gt=0)
    """The teacher's share if several are mixed."""
    chat_template: ChatTemplate | None = None
    """Replaces the model's chat template by a text or a file, if the teacher has another tokenizer than the student."""
