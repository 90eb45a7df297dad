"""Faults of a vLLM engine at its next refit; they run in the engine."""

from typing import Any

FAULTS = "tests.weights.faults:Faults"


class Faults:
    """On one rank of the engine."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def keep(self, name: str, rank: int = 0) -> None:
        """A layer computes with what it had before."""
        layer = dict(self.model.model.named_modules(remove_duplicate=False))[name]
        old, finish = layer.cpu_linear, self.model.finish

        def faulty() -> list[str]:
            missing: list[str] = finish()
            layer.cpu_linear, self.model.finish = old, finish
            return missing

        if self.model._worker.rank == rank:
            self.model.finish = faulty

    def raise_once(self, rank: int) -> None:
        """Taking a bucket fails."""
        load = self.model.load

        def faulty(named: Any) -> None:
            self.model.load = load
            raise ValueError("no room left")

        if self.model._worker.rank == rank:
            self.model.load = faulty

    def keep_parameters(self, name: str) -> None:
        """A layer in 8 bits, whose matrix lies there as it is, keeps what it had before."""
        layer = dict(self.model.model.named_modules(remove_duplicate=False))[name]
        old, finish = {kind: held.clone() for kind, held in layer.named_parameters()}, self.model.finish

        def faulty() -> list[str]:
            missing: list[str] = finish()
            for kind, held in layer.named_parameters():
                held.data.copy_(old[kind])
            self.model.finish = finish
            return missing

        self.model.finish = faulty
