"""The settings of a teacher, a model that is not trained."""

from typing import ClassVar, Literal

from pydantic import Field, field_validator

from whet.base.addresses import plain_address
from whet.chat.template_file import ChatTemplate
from whet.config import Config
from whet.models.config import ModelConfig

COLUMNS = frozenset({"topk_ids", "teacher_logprobs", "teacher_token_logprobs"})
"""The columns that teachers fill: their most likely tokens [N, K] with the log-probs of these, and the log-probs of the
given tokens [N]."""


class TeacherServer(Config):
    """A server that has a teacher's model and is already running; nothing on it is changed."""

    bare: ClassVar = "url"

    url: str
    """The address, such as http://10.0.0.5:8000."""
    protocol: Literal["vllm", "sglang"] = "vllm"
    """The server's HTTP interface."""
    model: str | None = None
    """The model's name in requests; None: the only one that the server lists."""
    api_key_env: str | None = None
    """The environment variable that holds the server's key; None: no key."""
    requests: int = Field(default=16, ge=1, le=10_000)
    """Maximum number of sequences that are scored at once."""
    deadline: float = Field(default=300.0, gt=0)
    """Seconds until a request without an answer is an error, after two repeats."""

    @field_validator("url")
    @classmethod
    def _address(cls, url: str) -> str:
        return plain_address(url)


class Teacher(ModelConfig):
    """A folder, such as the export of another run, or a Hub id."""

    path: str
    """The folder or Hub id. With ``server`` only its tokenizer and config are read."""
    server: TeacherServer | None = None
    """The server that has the model; None: the run loads it."""
    lora: None = None
    """Teachers have no adapters."""
    weight: float = Field(1.0, gt=0)
    """The teacher's share if several are mixed."""
    chat_template: ChatTemplate | None = None
    """Replaces the model's chat template by a text or a file, if the teacher has another tokenizer than the student."""
