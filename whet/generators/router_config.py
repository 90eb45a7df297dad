"""The settings of the router. Apart from it, so that a recipe is read without torch."""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from whet.config import Component, Config
from whet.generators.registry import GENERATORS

if TYPE_CHECKING:
    from whet.generators.router import Router


class RouterConfig(Config):
    """Several replicas of one generator, each with the same weights."""

    replica: Annotated[Any, Component(GENERATORS, base="whet.config:Config")] = Field(default="vllm")
    """What each replica is."""
    replicas: int = Field(default=2, ge=1)
    """How many."""
    slack: int = Field(default=16, ge=0)
    """A request goes where its prompt is known, unless that replica has this many more requests under way than the
    least busy one."""

    @property
    def max_context(self) -> int | None:
        """Of a replica."""
        return getattr(self.replica, "max_context", None)

    def build(self, model_config: Any, tokenizer: Any) -> "Router":
        """Generators whose weights are still to be published, behind one."""
        from whet.generators.router import Router

        return Router([self.replica.build(model_config, tokenizer) for _ in range(self.replicas)], self.slack)
