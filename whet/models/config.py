"""The settings of a model and of LoRA. Separate from the loading, so that a recipe is read without torch."""

from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from whet.base.extras import require
from whet.base.strict_json import JsonObject
from whet.config import Config
from whet.config.base import within
from whet.fetch import smollm2
from whet.fetch.model import absolute_path, check_model

Vision = Literal["frozen", "trained"]
DeviceName = Literal["auto", "cpu", "cuda"]
AttentionKernel = Literal["blocks", "flex", "varlen"]
AttentionName = Literal["auto", "blocks", "flex", "varlen"]


class LoraSettings(Config):
    """Low-rank adapters (arXiv 2106.09685) by PEFT; everything else is frozen."""

    rank: int = Field(default=16, ge=1, le=100_000)
    alpha: float = Field(default=32.0, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """Layers, by the end of their names, each of which must be found. In a mixture of experts ``all-linear``
    excludes routed experts."""
    experts: bool = False
    """Also adapt routed experts: A and B for each of them, of this rank."""
    rank_stabilized: bool = False
    """Scale B A by alpha / sqrt(rank) instead of alpha / rank (rsLoRA, arXiv 2312.03732)."""
    dora: bool = False
    """Also train the norm of each row of the matrices: W' = m (W + s B A) / |W + s B A| (DoRA, arXiv 2402.09353).
    Needs ``weights.lora=merged``."""
    quantize: Literal["nf4"] | None = None
    """``nf4``: keep the linear layers of the frozen model in 4 bits (QLoRA, arXiv 2305.14314), in a seventh of the
    memory of float32. The learner computes with the rounded weights, and a generator gets them. FSDP does not
    shard these layers. For dense models; needs ``whet[qlora]``."""

    @property
    def scaled_alpha(self) -> float:
        """The alpha for which alpha / rank is the scale of B A."""
        return self.alpha * self.rank**0.5 if self.rank_stabilized else self.alpha

    @property
    def unseen(self) -> JsonObject:
        """The settings that change what A and B compute and that their names and shapes don't show."""
        return {name: self.value_of(name) for name in ("alpha", "rank_stabilized", "quantize")}

    @model_validator(mode="after")
    def _fits_experts(self) -> "LoraSettings":
        if self.experts and self.dropout:
            raise ValueError("experts = true takes no dropout; set dropout to 0")
        if self.experts and self.dora:
            raise ValueError("experts = true can't be combined with dora = true; leave one of them out")
        if self.quantize and self.experts:
            raise ValueError(f"quantize = {self.quantize} can't be combined with experts = true; leave one of them out")
        return self


class ModelConfig(Config):
    """The model's weights. ``path`` is the built-in ``smollm2-135m-instruct``, a folder, an id on the Hugging Face Hub,
    or an artifact of ``whet export --name``, as in ``artifact:policy:latest``. The folder or id may be an adapter of
    PEFT, which is merged into its base model; the folder may have a checkpoint of Megatron Core in place of
    safetensors, which is converted."""

    bare: ClassVar = "path"

    path: str = smollm2.NAME
    lora: LoraSettings | None = None
    vision: Vision | None = None
    """Read images: load the model's vision tower, and train it or keep it ``frozen``; the layers between tower and
    decoder are always trained. None: text only."""
    trust_remote_code: bool = False
    """Lets a model's folder run its own Python code."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id."""

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, value: object) -> object:
        return {"path": value} if isinstance(value, str) else value

    @field_validator("path")
    @classmethod
    def _absolute(cls, path: str) -> str:
        return absolute_path(path)

    def check_available(self) -> None:
        if self.lora is not None:
            require("lora", "model.lora", "peft")
            if self.lora.quantize:
                require("qlora", "model.lora.quantize", "bitsandbytes")
        if self.vision is not None:
            require("images", "model.vision", "PIL")
        check_model(self.path)


def check_models(config: Config) -> None:
    """Raise ``WhetError`` if a model or an adapter that the config names anywhere is missing here and can't be
    downloaded."""
    for part in within(config):
        part.check_available()
