"""float32 masters of trained parameters that compute in a shorter type (precision bf16-true).

A bfloat16 weight has 8 significant bits: an update smaller than 1/256 of it is lost, and so is a small gradient added
to a large sum. So each trained parameter keeps a float32 master, which is what the optimizer and checkpoints see:

1. Each backward pass makes a gradient in the parameter's own type. It is added to the master's float32 gradient at once
   and dropped, so sums over microbatches, parts and replicas, the norm and clipping are in float32.
2. After each optimizer step the parameters become their masters, rounded.

Price: 18 bytes per trained parameter with AdamW (2 + master 4 + gradient 4 + moments 8) as under bf16-mixed; what is
saved are activations, messages and frozen weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from entrain_opt.runtime.shards import Shard


class MasterWeights:
    """Masters of those parameters that train and are not in float32.

    Args:
        parameters: on their device, with their initial values.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._masters: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        for parameter in parameters.values():
            if parameter.requires_grad and parameter.dtype != torch.float32 and id(parameter) not in self._masters:
                master = nn.Parameter(parameter.detach().float())
                self._masters[id(parameter)] = (parameter, master)
                parameter.register_post_accumulate_grad_hook(self._take_gradient)

    def __len__(self) -> int:
        return len(self._masters)

    def of(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """What the optimizer updates in place of a parameter: its master, or itself."""
        found = self._masters.get(id(parameter))
        return parameter if found is None else found[1]

    def shard_of(self, parameter: nn.Parameter, base: Shard | None) -> Shard | None:
        """Which part of the whole tensor `of` is; None for all of it.

        Args:
            parameter: as this device holds it.
            base: which part that is.
        """
        return base

    def write_back(self) -> None:
        """Give the parameters the values of their masters."""
        with torch.no_grad():
            for parameter, master in self._masters.values():
                parameter.copy_(master)

    def _take_gradient(self, parameter: Tensor) -> None:
        _, master = self._masters[id(parameter)]
        assert parameter.grad is not None
        master.grad = add_in_float32(master.grad, parameter.grad)
        parameter.grad = None


def add_in_float32(total: Tensor | None, gradient: Tensor) -> Tensor:
    """The float32 sum of gradients with one more added, in place if there is a sum already."""
    return gradient.float() if total is None else total.add_(gradient)
