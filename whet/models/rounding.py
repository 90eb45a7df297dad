"""The weights that autocast rounds to bfloat16 wherever they are used, so that they may as well be kept or sent in it.
Norms are not among them: they multiply hidden states as they are."""

from collections.abc import Iterator

from torch import nn

from whet.models.moe.experts import experts_of


def rounded_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the linear layers and the experts. The head is among them if ``model`` has one."""
    for module in model.modules():
        if type(module) is nn.Linear:
            yield module
    for _, experts in experts_of(model):
        yield experts
