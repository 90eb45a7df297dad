"""The settings of a judge. Separate from its client, so that a recipe is read without an HTTP client."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from whet.base.addresses import HttpAddress, key_in
from whet.base.errors import ConfigError
from whet.config import Config
from whet.config.base import within
from whet.fetch.model import absolute_path, check_model

NO_POLICY = (
    "judge.model = policy: a policy can be asked only in a run, and in an evaluation that loads its model; name "
    "another model as the judge, as in data.judge.model=smollm2-135m-instruct, or take the task set without its judge"
)
_POLICY = "policy"
_OF_SERVERS, _OF_HOSTED, _OF_OTHERS = ("api_key_env",), ("revision", "process"), ("deadline",)


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
    """A judge, which is a model that the run hosts itself, the policy or, with ``url``, any server of OpenAI's chat
    API."""

    bare: ClassVar = "model"

    url: HttpAddress | None = None
    """The URL of the API of a server, e.g. http://127.0.0.1:8000/v1. None: the run hosts ``model``."""
    model: str
    """With ``url`` the name of the model in requests. Otherwise the model that the run hosts: the built-in
    ``smollm2-135m-instruct``, a folder, an artifact or an id on the Hugging Face Hub. ``policy``: the policy itself,
    asked in the run's generator with the weights of the moment. ``policy:base``: its model without the adapter that is
    trained; ``policy:NAME``: under one of ``generator.adapters``. Both are frozen, and need no further memory."""
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
    """0: the likeliest tokens, and temperature 1 where such a reply has no verdict and the judge is asked again."""
    max_tokens: int = Field(512, gt=0)
    """Most tokens of a verdict."""
    deadline: float = Field(120.0, gt=0)
    """Seconds for one request. The policy has no such limit, because its requests wait while weights are replaced;
    ``generator.deadline`` holds for them."""
    retries: int = Field(3, ge=0)
    """Repeats of a request after a failure, or a verdict that can't be read."""
    concurrency: int = Field(16, gt=0)
    """Most requests in flight."""

    @model_validator(mode="before")
    @classmethod
    def _hosted(cls, value: object) -> object:
        if isinstance(value, str):
            value = {"model": value}
        if isinstance(value, dict) and not value.get("url") and isinstance(value.get("model"), str):
            return value | {"model": value["model"] if _asks(value["model"]) else absolute_path(value["model"])}
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> "Judge":
        ignored: Sequence[str] = _OF_SERVERS if self.url is None else _OF_HOSTED
        where = "with a url" if self.url is None else "without a url"
        if self.is_policy:
            ignored, where = (*_OF_SERVERS, *_OF_HOSTED, *_OF_OTHERS), "where another model is the judge"
        values = dict(self)
        for name in ignored:
            if values[name] != type(self).model_fields[name].default:
                raise ValueError(f"{name} is read only {where}; leave it out")
        return self

    @property
    def is_policy(self) -> bool:
        """Return whether the run's generator is asked: for the policy, or its model under another adapter."""
        return self.url is None and _asks(self.model)

    @property
    def adapter(self) -> str | None:
        """The name of the adapter that replaces the policy's, ``base`` for none; None: the policy itself."""
        return adapter_of(self.model) if self.is_policy else None

    def check_available(self) -> None:
        key_in(self.api_key_env, "judge.api_key_env")
        if self.url is None and not self.is_policy:
            check_model(self.model)


def adapter_of(model: str) -> str | None:
    """Return NAME of ``policy:NAME``; None for any other name of a model."""
    return model.removeprefix(f"{_POLICY}:") if _asks(model) and model != _POLICY else None


def _asks(model: str) -> bool:
    return model == _POLICY or model.startswith(f"{_POLICY}:")


def own_judges(settings: object) -> list[Judge]:
    """Return the judges in these settings, and in nested ones, that are the policy."""
    return [part for part in within(settings) if isinstance(part, Judge) and part.is_policy]


def check_has_no_own_judge(settings: object) -> None:
    """Raise ``ConfigError`` for a judge that is the policy, where a task set is opened without one."""
    if own_judges(settings):
        raise ConfigError(NO_POLICY)


def _not_the_policy(model: Judge) -> Judge:
    if model.is_policy and model.adapter is None:
        raise ValueError(
            "only a judge may be the policy: name another model, policy:base or policy:NAME for the policy's model "
            "under a frozen adapter, or ./policy for a folder of this name"
        )
    return model


OtherModel = Annotated[Judge, AfterValidator(_not_the_policy)]
"""A model that is asked as judges are and does not learn."""
