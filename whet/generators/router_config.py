"""The settings of the router. Apart from it, so that a recipe is read without torch."""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

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
    devices: str | None = Field(default=None, min_length=1)
    """The GPUs of all replicas, as CUDA_VISIBLE_DEVICES says it, shared out in this order: with 2 replicas of
    ``tensor`` 2, "4,5,6,7" gives the first one 4 and 5. None: what ``replica.devices`` says, the same for all."""
    slack: int = Field(default=16, ge=0)
    """A request goes where its prompt is known, unless that replica has this many more requests under way than the
    least busy one."""

    @model_validator(mode="after")
    def _devices_for_each_replica(self) -> "RouterConfig":
        if self.devices is None:
            return self
        if not hasattr(self.replica, "devices") or self.replica.devices is not None:
            raise ValueError("devices are shared out among replicas that take devices and don't name their own")
        each, named = getattr(self.replica, "tensor", 1), len(self.devices.split(","))
        if named != self.replicas * each:
            raise ValueError(
                f"devices = {self.devices!r} names {named}, and {self.replicas} replicas of {each} take "
                f"{self.replicas * each}"
            )
        return self

    @property
    def max_context(self) -> int | None:
        """Of a replica."""
        return getattr(self.replica, "max_context", None)

    def build(self, model_config: Any, tokenizer: Any) -> "Router":
        """Generators whose weights are still to be published, behind one."""
        from whet.generators.router import Router

        return Router(
            [self._replica(number).build(model_config, tokenizer) for number in range(self.replicas)], self.slack
        )

    def _replica(self, number: int) -> Any:
        if self.devices is None:
            return self.replica
        devices = self.devices.split(",")
        each = len(devices) // self.replicas
        return self.replica.model_copy(update={"devices": ",".join(devices[number * each : (number + 1) * each])})
