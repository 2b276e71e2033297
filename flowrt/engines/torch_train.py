"""A training engine on plain PyTorch: data-parallel ranks that accumulate at their own pace and meet once a step.

Every micro-batch adds the gradient of a *sum* of token losses; only the step divides, by the token count of all
micro-batches of all ranks. How a step was cut therefore cannot change its gradient.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from flowrt.algorithms import GrpoLoss
from flowrt.engines.checkpoint import named_parameters
from flowrt.engines.options import TrainOptions
from flowrt.engines.passes import LossPasses, ranks, step_metrics
from flowrt.engines.protocols import TrainingBatch
from flowrt.engines.schedules import learning_rate


class TorchTrainer:
    """AdamW on the GRPO loss. With more than one rank, `torch.distributed` must be initialised."""

    def __init__(self, model: Any, options: TrainOptions, loss: GrpoLoss, *, correction_cap: float, temperature: float):
        self.model = model.train()
        self._options = options
        self._passes = LossPasses(
            loss, correction_cap=correction_cap, temperature=temperature, forward_tokens=options.forward_tokens
        )
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=options.lr, betas=(options.beta1, options.beta2), weight_decay=options.weight_decay
        )
        self.on_gradient: Callable[[torch.Tensor], None] | None = None  # sees each step's global gradient
        self._steps = 0

    def accumulate(self, batch: TrainingBatch) -> None:
        for rows in self._passes.cut(batch):
            self._passes.loss_sum(self.model, batch, rows).backward()

    def step(self) -> dict[str, float]:
        sums = self._passes.global_sums()
        if not sums["tokens"]:
            return {}
        gradient = torch.cat([self._gradient(parameter).reshape(-1) for parameter in self._parameters])
        if ranks() > 1:
            dist.all_reduce(gradient)
        gradient /= sums["tokens"]
        if self.on_gradient is not None:
            self.on_gradient(gradient)
        norm = float(gradient.norm())
        if norm > self._options.max_grad_norm:
            gradient *= self._options.max_grad_norm / norm
        offset = 0
        for parameter in self._parameters:
            size = parameter.numel()
            parameter.grad = gradient[offset : offset + size].view_as(parameter)
            offset += size
        lr = learning_rate(self._options, self._steps)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._steps += 1
        self._passes.forget()
        return step_metrics(sums, norm, lr)

    def parameters(self) -> Mapping[str, torch.Tensor]:
        return named_parameters(self.model)

    @staticmethod
    def _gradient(parameter: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
