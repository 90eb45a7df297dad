"""The settings of engines that are servers, which are already running."""

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from whet.base.addresses import key_in, plain_address
from whet.base.errors import ConfigError
from whet.base.lazy import FileDtype
from whet.core.types import Distribution
from whet.engines.config import Deployment, GeneratorConfig
from whet.engines.vllm.config import check_images

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from whet.cluster.config import ClusterConfig, DevicesConfig
    from whet.engines.base import Engine
    from whet.engines.server.generator import ServerGenerator

SGLANG_WITH_IMAGES = ("qwen2_5_vl", "qwen3_vl")
"""The types of models in whose prompts SGLang puts images without a change of other tokens."""


def check_sglang_images(model: "PretrainedConfig") -> None:
    """Raise ``ConfigError`` if SGLang may read a prompt with images as other tokens than the learner does."""
    if model.model_type not in SGLANG_WITH_IMAGES:
        raise ConfigError(
            f"generator.protocol = sglang reads images with {', '.join(SGLANG_WITH_IMAGES)}, not with "
            f"{model.model_type}: SGLang would turn such a prompt into text and encode it again, to other tokens, or "
            "doesn't have the model; set generator=torch, or leave model.vision out"
        )


class RemoteConfig(GeneratorConfig):
    """Servers that are already running, each with the whole model; new weights reach them as files in a folder."""

    pauses: ClassVar[bool] = True

    urls: list[str] = Field(min_length=1)
    """The addresses of the servers, such as http://10.0.0.5:8000."""
    protocol: Literal["vllm", "sglang"] = "vllm"
    """The servers' HTTP interface."""
    model: str | None = None
    """The model's name in requests; None: the only one that a server lists."""
    api_key_env: str | None = None
    """The environment variable that holds the servers' key; None: no key."""
    folder: Path | None = None
    """The folder for new weights, which this process and the servers see under the same path; None: the system's
    folder for temporary files."""
    dtype: Literal["auto"] | FileDtype = "auto"
    """The dtype of the files, and of the servers' computations. ``auto``: as ``learner.precision`` chooses."""

    @property
    def servers(self) -> tuple[str, ...]:
        return tuple(self.urls)

    @property
    def refuses_images(self) -> str | None:
        return None

    @property
    def keeps_images(self) -> bool:
        return self.protocol == "sglang"

    @field_validator("urls")
    @classmethod
    def _addresses(cls, urls: list[str]) -> list[str]:
        plain = [plain_address(url) for url in urls]
        if len(set(plain)) < len(plain):
            raise ValueError("two URLs are the same; name each server once")
        return plain

    @model_validator(mode="before")
    @classmethod
    def _one_replica_for_each_url(cls, values: object) -> object:
        if not isinstance(values, dict) or not isinstance(values.get("urls"), list | tuple):
            return values
        count = len(values["urls"])
        if count and values.get("replicas", 1) not in (1, count):  # 1 is the default
            raise ValueError(f"replicas = {values['replicas']}, but urls names {count} servers; leave replicas out")
        return values | ({"replicas": count} if count else {})

    @model_validator(mode="after")
    def _can_keep_caches(self) -> "RemoteConfig":
        if self.protocol == "sglang" and self.on_refit == "keep":
            raise ValueError(
                "on_refit = keep needs protocol = vllm: SGLang can't hide cached prompts of older weights from new "
                "requests; set on_refit=recompute"
            )
        return self

    def problems(self, cluster: "ClusterConfig", devices: "DevicesConfig") -> Iterator[str]:
        yield from super().problems(cluster, devices)
        if self.on_cluster or devices.placement == "colocated" or devices.generator_cores is not None:
            yield (
                "generator.type = remote samples on servers that this run doesn't place; leave generator.on_cluster, "
                "devices.placement and devices.generator_cores out"
            )

    def cannot_sample(self, distribution: Distribution) -> str | None:
        d = distribution
        if self.protocol == "sglang" and (d.top_k or d.top_p < 1 or d.min_p):
            return (
                "SGLang reports log-probs before it applies top_k, top_p and min_p, so they do not belong to "
                "the sampled distribution; leave sampling.top_k, top_p and min_p out, or sample with vLLM"
            )
        return None

    def key(self) -> str | None:
        """Return the servers' key. Raises ``ConfigError`` if it is not in the environment."""
        return key_in(self.api_key_env, "generator.api_key_env")

    def build(
        self,
        model: "PretrainedConfig",
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        deployment: Deployment | None = None,
    ) -> "Engine[object]":
        """See ``GeneratorConfig``. The engines share a folder, to which the weights are written once."""
        if self.dtype == "auto":
            return self.resolve_auto(model, "cpu").build(model, tokenizer, deployment)
        from whet.engines.router import Router
        from whet.engines.server.folder import WeightFolder
        from whet.engines.server.generator import ServerGenerator

        self.key()
        images = None if deployment is None else deployment.images
        if images is not None:
            if self.protocol == "vllm":
                check_images(model)
                if model.model_type == "qwen3_vl_moe":
                    raise ConfigError(
                        "servers of vLLM's build for CPUs compute with wrong experts of qwen3_vl_moe once they load "
                        "new weights, and others were not tried; set generator=vllm or generator=torch"
                    )
            else:
                check_sglang_images(model)
        folder, run = WeightFolder(self.folder, model, tokenizer), secrets.token_hex(4)

        def engine(number: int, returns: bool = False) -> "ServerGenerator":
            return ServerGenerator(self, self.urls[number], model, tokenizer, folder, run, returns, images)

        if len(self.urls) == 1:
            return engine(0)
        engines = [engine(number) for number in range(len(self.urls))]
        return Router(engines, self.prefix_weight, lambda number: engine(number, returns=True), self.restarts)

    def build_replica(
        self, model: "PretrainedConfig", tokenizer: "PreTrainedTokenizerBase | None", deployment: Deployment
    ) -> "Engine[object]":
        """Return the engines of all servers."""
        return self.build(model, tokenizer, deployment)
