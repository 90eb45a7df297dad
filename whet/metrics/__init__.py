"""Metrics that merge without bias over micro-batches, ranks, minibatches and steps, in any order."""

from whet.metrics.metrics import Metrics

__all__ = ["Metrics"]
