"""The settings of a judge. Separate from its client, so that a recipe is read without an HTTP client."""

from typing import Literal

from pydantic import Field, model_validator

from whet.config import Config
from whet.fetch.model import absolute_path, check_model

_OF_SERVERS, _OF_HOSTED = ("api_key_env",), ("revision", "process")


class JudgeProcess(Config):
    """The settings of the process of a judge that the run hosts."""

    threads: int = Field(1, ge=1)
    """Threads of the process, which leaves the processor to the policy where both compute."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The dtype of its computations. ``auto``: the faster one on this machine, by the rule of ``learner.precision``."""
    max_context: int = Field(4096, ge=2)
    """Most tokens of a question and its verdict."""
    max_batch: int = Field(16, ge=1)
    """Most verdicts that are written at once."""
    start_s: float = Field(600.0, gt=0)
    """Seconds to load the model, including its download."""


class Judge(Config):
    """A judge, which is a model that the run hosts itself or, with ``url``, any server of OpenAI's chat API."""

    url: str | None = Field(None, pattern=r"^https?://")
    """The URL of the API of a server, e.g. http://127.0.0.1:8000/v1. None: the run hosts ``model``."""
    model: str
    """With ``url`` the name of the model in requests. Otherwise the model that the run hosts: the built-in
    ``smollm2-135m-instruct``, a folder, an artifact or an id on the Hugging Face Hub."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id."""
    process: JudgeProcess = JudgeProcess()
    """The process of a model that the run hosts."""
    verdict: Literal["text", "logprobs"] = "text"
    """``text``: the judge writes its verdict. ``logprobs``: the probabilities of its first token are the verdict, which
    a small model needs; the question must have ``choices``, or compare two answers."""
    api_key_env: str | None = None
    """The environment variable that holds the key of a server; None: no key."""
    temperature: float = Field(0.0, ge=0)
    max_tokens: int = Field(512, gt=0)
    """Most tokens of a verdict."""
    deadline: float = Field(120.0, gt=0)
    """Seconds for one request."""
    retries: int = Field(3, ge=0)
    """Repeats of a request after a failure, or a verdict that can't be read."""
    concurrency: int = Field(16, gt=0)
    """Most requests in flight."""

    @model_validator(mode="before")
    @classmethod
    def _hosted(cls, value: object) -> object:
        if value == "policy" or (isinstance(value, dict) and not value.get("url") and value.get("model") == "policy"):
            raise ValueError(
                "the policy can't be its own judge: its rewards would change with every step, and it would learn to "
                "approve of itself. A frozen copy judges alike in every step: set judge.model to the model.path"
            )
        if isinstance(value, dict) and not value.get("url") and isinstance(value.get("model"), str):
            return value | {"model": absolute_path(value["model"])}
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> "Judge":
        ignored, where = (_OF_SERVERS, "with a url") if self.url is None else (_OF_HOSTED, "without a url")
        values = dict(self)
        for name in ignored:
            if values[name] != type(self).model_fields[name].default:
                raise ValueError(f"{name} is read only {where}; leave it out")
        return self

    def check_model(self) -> None:
        """Raise ``WhetError`` if the run hosts a model that is missing here and can't be downloaded."""
        if self.url is None:
            check_model(self.model)
