"""Metrics that can be added up: over micro-batches, ranks, minibatches and steps, in any order, without a bias."""

from whet.metrics.metrics import Metrics

__all__ = ["Metrics"]
