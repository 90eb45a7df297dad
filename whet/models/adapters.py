"""Adapters of PEFT, switched off while the model that they adapt is computed."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Let the model compute as if it had no adapters. Unlike PEFT's own context, this one leaves parameters frozen that
    were frozen before, and takes a stage of a pipeline none of whose layers is adapted."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter, was_trained in trained:
            parameter.requires_grad_(was_trained)
