"""The Muon optimizer for weight matrices. It updates all matrices of equal shape in one batch."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """Return approximately the nearest semi-orthogonal matrix of each matrix.

    ``matrices`` is ``[n, rows, columns]``. The method is a Newton-Schulz iteration with ``steps``
    steps. Source: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks".
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    if x.device.type == "cuda":
        x = x.bfloat16()
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Optimizer that orthogonalizes the momentum of each matrix before it updates the matrix.

    The updates are scaled to about the size of Adam's updates, so that a learning rate for Adam
    also suits this optimizer.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        weight_decay: float = 0.05,
        momentum: float = 0.95,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        if closure is not None:
            raise ValueError("Muon takes no closure")
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                self._step_shape(group, shape, parameters)

    def _step_shape(
        self, group: dict[str, Any], shape: torch.Size, parameters: list[Tensor]
    ) -> None:
        gradients = torch.stack([p.grad for p in parameters if p.grad is not None])
        state = self.state[parameters[0]]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(gradients)
        state["momentum"].lerp_(gradients, 1 - group["momentum"])
        updates = orthogonal(gradients.lerp(state["momentum"], group["momentum"]))
        rate = group["lr"]
        torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
        torch._foreach_add_(parameters, list(updates), alpha=-rate * 0.2 * max(shape) ** 0.5)
