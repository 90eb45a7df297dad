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
