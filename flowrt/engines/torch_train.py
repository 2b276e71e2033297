"""A training engine on plain PyTorch: data-parallel ranks that accumulate at their own pace and meet once a step.

Every micro-batch adds the gradient of a *sum* of token losses; only the step divides, by the token count of all
micro-batches of all ranks. How a step was cut therefore cannot change its gradient.
"""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flowrt.algorithms import GrpoLoss
from flowrt.engines.checkpoint import named_parameters, without_dropout, written_dtype
from flowrt.engines.faster import made_fast
from flowrt.engines.options import TrainOptions
from flowrt.engines.passes import LossPasses, finite, ranks, step_metrics
from flowrt.engines.protocols import TrainingBatch
from flowrt.engines.schedules import learning_rate
from flowrt.engines.state import gather_rng, read_tensors, restore_rng, write_tensors
from flowrt.errors import EngineError


class TorchTrainer:
    """AdamW on the GRPO loss. With more than one rank, `torch.distributed` must be initialised."""

    def __init__(self, model: Any, options: TrainOptions, loss: GrpoLoss, *, correction_cap: float, temperature: float):
        self.model = made_fast(without_dropout(model), options).train()
        self._options = options
        self._passes = LossPasses(
            loss, correction_cap=correction_cap, temperature=temperature, forward_tokens=options.forward_tokens
        )
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=options.lr,
            betas=(options.beta1, options.beta2),
            weight_decay=options.weight_decay,
            fused=True,
        )
        self.on_gradient: Callable[[torch.Tensor], None] | None = None  # sees each step's global gradient
        self._steps = 0
        # Read now: what it was loaded from may be gone when training ends.
        origin = str(getattr(model, "name_or_path", ""))
        from_files = bool(origin) and (Path(origin) / "config.json").is_file()
        as_it_is = options.final_dtype == "source" and not from_files
        self._final_dtype = model.dtype if as_it_is else written_dtype(origin, options.final_dtype)

    def accumulate(self, batch: TrainingBatch) -> None:
        for rows in self._passes.cut(self.model, batch):
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
        norm = finite(float(gradient.norm()), self._steps)
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
        self._steps += 1
        self.discard()
        return step_metrics(sums, norm, lr)

    def parameters(self) -> Mapping[str, torch.Tensor]:
        return named_parameters(self.model)

    def save(self, directory: Path) -> None:
        """All ranks have the same weights and optimiser: rank 0 writes them, with the random numbers of each rank."""
        tensors = gather_rng()
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        tensors["steps"] = torch.tensor(self._steps)
        for name, parameter in self._named_state().items():
            tensors[f"model.{name}"] = parameter.detach()
        for name, parameter in self.model.named_parameters():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{name}.{key}"] = value
        write_tensors(directory, tensors)

    def load(self, directory: Path) -> None:
        tensors = read_tensors(directory)
        mine = {f"model.{name}": parameter for name, parameter in self._named_state().items()}
        saved = {name: tensor.shape for name, tensor in tensors.items() if name.startswith("model.")}
        if saved != {name: tensor.shape for name, tensor in mine.items()} or "steps" not in tensors:
            raise EngineError(f"{directory} holds the state of another model; was the run's model changed?")
        with torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(tensors[name])
        self._optimizer.state.clear()
        for name, parameter in self.model.named_parameters():
            start = f"optimizer.{name}."
            state = {key.removeprefix(start): value for key, value in tensors.items() if key.startswith(start)}
            if state:  # AdamW's own step counts stay where it keeps them, on the host
                self._optimizer.state[parameter] = {
                    key: value.to(parameter.device) if value.shape == parameter.shape else value
                    for key, value in state.items()
                }
        self._steps = int(tensors["steps"])
        self.discard()
        restore_rng(tensors)

    def export(self, directory: Path) -> None:
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        # A copy of everything but the weights, which are shared where their type is right; tied ones stay tied.
        weights = {
            id(one): torch.nn.Parameter(one.detach().to(self._final_dtype), requires_grad=False)
            for one in self.model.parameters()
        }
        copy.deepcopy(self.model, weights).save_pretrained(directory)

    def discard(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._passes.forget()

    def _named_state(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers, each once."""
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    @staticmethod
    def _gradient(parameter: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
