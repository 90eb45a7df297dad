"""A scalar head on a model's hidden states: a critic's value of a token, a reward model's score of a conversation."""

import torch
from torch import Tensor, nn

from whet.base.seeds import derive_seed


class ValueHead(nn.Module):
    """One linear map to a number, kept in float32: values are regressed, and bfloat16 has 8 bits of mantissa. It has no
    bias, as the heads of transformers' sequence classifiers have none, so that a reward model can become one."""

    def __init__(self, hidden_size: int, *, seed: int = 0, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1, bias=False, device=device)
        generator = torch.Generator().manual_seed(derive_seed("value head", seed))
        with torch.no_grad():
            self.linear.weight.copy_(torch.randn(1, hidden_size, generator=generator) / (hidden_size + 1))

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, H] -> [T]"""
        with torch.autocast(hidden.device.type, enabled=False):
            values: Tensor = self.linear(hidden.to(self.linear.weight.dtype)).squeeze(-1)
        return values
