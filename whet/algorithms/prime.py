"""PRIME (arXiv 2502.01456): every token gets a reward of its own, from a reward model that is learned on the way and
only ever sees the outcomes of whole answers. A second language model tells right answers from wrong ones by its
log-ratio to its frozen start; token by token, that ratio is the process reward."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from whet.algorithms.advantage_registry import ADVANTAGES
from whet.algorithms.base import Head
from whet.algorithms.grpo import GRPO
from whet.config import Component
from whet.errors import ConfigError
from whet.learner.config import OptimizerConfig
from whet.losses.registry import LOSSES
from whet.models.config import LoraSettings, ModelConfig
from whet.rollouts.filters import FILTERS, Filter
from whet.types import Weighting

if TYPE_CHECKING:
    from whet.losses.base import Loss


class RewardStart(ModelConfig):
    """What the implicit reward model starts from."""

    lora: LoraSettings | Literal[False] | None = None  # type: ignore[assignment]
    """By default adapters as the policy has them, if it has any; false: full weights."""


class PRIME(GRPO):
    """A policy and an implicit reward model. What a step's answers earn is read before the step trains either."""

    heads: ClassVar[dict[str, Head]] = {"policy": "language", "implicit_reward": "language"}
    filled_by: ClassVar[dict[str, tuple[str, str]]] = GRPO.filled_by | {
        "reward_logprobs": ("implicit_reward", "logprobs"),
        "reward_reference_logprobs": ("implicit_reward", "reference_logprobs"),
    }

    advantage: Annotated[Any, Component(ADVANTAGES, base="whet.config:Config")] = "process_rewards"
    reward_loss: Annotated[Any, Component(LOSSES, base="whet.config:Config")] = Field(default="implicit_reward")
    """What the reward model minimises."""
    reward_model: RewardStart | None = None
    """What the reward model starts from, with the policy's tokenizer; by default what the policy starts from."""
    reward_lr: float | None = Field(None, ge=0)
    """The reward model's learning rate; by default that of the policy."""
    filters: tuple[Annotated[Filter, Component(FILTERS)], ...] = Field(default=("pass_rate",))  # type: ignore[arg-type]
    weighting: Weighting = "sequence"

    @property
    def losses(self) -> "dict[str, Loss]":
        return {"policy": self.loss, "implicit_reward": self.reward_loss}

    @property
    def fills(self) -> frozenset[str]:
        return super().fills | {"reward_logprobs", "reward_reference_logprobs"}

    def model_of(self, role: str, shared: ModelConfig) -> ModelConfig:
        own = self.reward_model
        if role != "implicit_reward" or own is None:
            return shared
        lora = shared.lora if own.lora is None else own.lora or None
        return ModelConfig(**own.model_dump(exclude={"lora"}), lora=lora)

    def check_models(self, model: ModelConfig) -> None:
        from whet.algorithms.vocabulary import same_tokens

        own = self.reward_model
        if own is not None and not same_tokens(model, own):
            raise ConfigError(
                f"algorithm.reward_model = {own.path} has another tokenizer than the policy, {model.path}; the reward "
                "model reads the policy's tokens, so choose a model with the same tokenizer"
            )

    def optimizer(self, role: str, shared: OptimizerConfig) -> OptimizerConfig:
        if role != "implicit_reward" or self.reward_lr is None:
            return shared
        return shared.model_copy(update={"lr": self.reward_lr})
