"""A training engine on plain PyTorch: data-parallel ranks accumulate at their own pace and communicate once a step.

- Every micro-batch adds the gradient of a *sum* of losses; only the step divides, by the global count of tokens,
  samples or groups. So the gradient does not depend on how the step was split.
- Mixed precision with master parameters (arXiv 1710.03740, section 3.1): the model computes in a narrow dtype, and the
  optimiser updates a copy of its parameters in a wide one, in which gradients are accumulated too. Updates far smaller
  than a parameter, and the sum of many gradients, would be lost to rounding.
"""

import copy
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import GenerationConfig

from flowrt.algorithms.algorithm import Algorithm
from flowrt.engines.base import TrainingBatch
from flowrt.engines.exported_model import GENERATION
from flowrt.engines.hf import export_dtype, model_name, named_parameters, set_training_mode
from flowrt.engines.options import TrainOptions
from flowrt.engines.training.deferred import DeferredStep
from flowrt.engines.training.forward import apply_optimizations
from flowrt.engines.training.loss_passes import LossPasses, ranks
from flowrt.engines.training.optimizer import adamw, check_finite, optimizer_state, optimizer_step
from flowrt.engines.training.saved_state import (
    gather_rng,
    number_tensors,
    numbers_of,
    read_tensors,
    restore_rng,
    write_tensors,
)
from flowrt.errors import EngineError


class MasterParameters:
    """The wide parameters of a model, which the constructor replaces by narrow copies. Tied parameters stay tied.

    Args:
        model: a model with parameters in the wide dtype. The dtype of buffers, such as the frequencies of rotary
            embeddings, does not change.
        narrow: dtype of forward and backward passes.
    """

    def __init__(self, model: Any, narrow: torch.dtype) -> None:
        self._of: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        narrowed: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        for module in list(model.modules()):
            for name, master in list(module.named_parameters(recurse=False)):
                if master not in narrowed:
                    narrowed[master] = torch.nn.Parameter(
                        master.detach().to(narrow), requires_grad=master.requires_grad
                    )
                setattr(module, name, narrowed[master])
        for master, parameter in narrowed.items():
            if parameter.requires_grad:
                self._of[parameter] = master
                parameter.register_post_accumulate_grad_hook(self._accumulate)

    def of(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        """The wide parameter of a trainable parameter of the model. Raises KeyError for other parameters."""
        return self._of[parameter]

    @torch.no_grad()
    def write(self) -> None:
        """Copy the wide parameters, rounded, to the model."""
        for parameter, master in self._of.items():
            parameter.copy_(master)

    @torch.no_grad()
    def _accumulate(self, parameter: torch.Tensor) -> None:
        """Add a parameter's new gradient to the gradient of its master parameter."""
        assert isinstance(parameter, torch.nn.Parameter)
        assert parameter.grad is not None
        master = self._of[parameter]
        if master.grad is None:
            master.grad = parameter.grad.to(master.dtype)
        else:
            master.grad += parameter.grad
        parameter.grad = None


class TorchTrainer:
    """AdamW on the terms of an algorithm. With more than one rank, `torch.distributed` must be initialised.

    Args:
        model: a transformers causal LM, on the device of the engine, in the dtype of the optimiser's parameters.
        options: options of the optimiser and of forward passes.
        algorithm: the objective.
        temperature: sampling temperature.
        narrow: dtype of forward and backward passes, and of the published weights; None: that of the model.
    """

    applies_supports = True

    def __init__(
        self,
        model: Any,
        options: TrainOptions,
        algorithm: Algorithm,
        *,
        temperature: float,
        narrow: torch.dtype | None = None,
    ) -> None:
        wide: torch.dtype = model.dtype
        self._masters = MasterParameters(model, narrow) if narrow not in (None, wide) else None
        self.model = apply_optimizations(set_training_mode(model, dropout=options.dropout), options)
        self._options = options
        self._passes = LossPasses(algorithm, temperature=temperature, forward_tokens=options.forward_tokens)
        self._parameters = [self._master(parameter) for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = adamw(self._parameters, options, next(model.parameters()).device.type)
        self.on_gradient: Callable[[torch.Tensor], None] | None = None  # called with each step's global gradient
        self._steps = 0
        self._is_checked = False  # whether rollout and trainer were compared at equal weights
        self._lr = 0.0
        self._deferred = DeferredStep(self._passes)
        # Read now: the initial checkpoint may be deleted before training ends.
        origin = str(getattr(model, "name_or_path", ""))
        from_files = bool(origin) and (Path(origin) / "config.json").is_file()
        keep_dtype = options.final_dtype == "source" and not from_files
        self._final_dtype = wide if keep_dtype else export_dtype(origin, options.final_dtype)
        generation = Path(origin) / GENERATION
        self._generation = generation.read_text() if from_files and generation.is_file() else ""

    def accumulate(self, batch: TrainingBatch) -> None:
        self._passes.note_batch()
        if self._passes.is_deferred:
            self._deferred.add(self.model, batch)
            return
        for rows in self._passes.cut(self.model, batch):
            self._passes.loss_sum(self.model, batch, rows).backward()

    def step(self) -> dict[str, float]:
        norms = self._deferred_updates() if self._passes.is_deferred else []
        sums = self._passes.global_sums()
        if not sums["tokens"]:
            self._steps += bool(sums["batches"])
            self.discard()
            return self._passes.untrained_metrics(sums, self._lr)
        if not self._passes.is_deferred:
            norms = [self._update(sums[self._passes.denominator])]
        self._steps += 1
        self.discard()
        return self._passes.step_metrics(sums, statistics.fmean(norms), self._lr)

    def _deferred_updates(self) -> list[float]:
        """Make the optimiser updates of a deferred step. Returns the gradient norms. Collective."""
        batch, updates = self._deferred.complete()
        norms = []
        for number, update in enumerate(updates):
            for rows in self._passes.cut(self.model, batch, update.rows):
                self._passes.loss_sum(self.model, batch, rows, update.context).backward()
            norms.append(self._update(1.0, number))
            self._optimizer.zero_grad(set_to_none=True)
        return norms

    def _update(self, divisor: float, number: int = 0) -> float:
        """Make one optimiser update with the gradient over ``divisor``. Returns its norm. Collective."""
        if not self._is_checked:
            self._passes.check_equal_weights(self._options.max_initial_mismatch, model_name(self.model))
            self._is_checked = True
        gradients = [self._gradient(parameter) for parameter in self._parameters]
        if ranks() > 1:
            gradients = _summed_over_ranks(gradients)
        torch._foreach_div_(gradients, divisor)
        if self.on_gradient is not None:
            self.on_gradient(torch.cat([gradient.reshape(-1) for gradient in gradients]))
        norm = check_finite(float(torch.nn.utils.get_total_norm(gradients)), self._steps, number)
        if norm > self._options.max_grad_norm:
            torch._foreach_mul_(gradients, self._options.max_grad_norm / norm)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        self._lr = optimizer_step(self._optimizer, self._options, self._steps)
        if self._masters is not None:
            self._masters.write()
        return norm

    def _master(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        """The tensor that the optimiser updates for this parameter of the model."""
        return parameter if self._masters is None or not parameter.requires_grad else self._masters.of(parameter)

    def parameters(self) -> Mapping[str, torch.Tensor]:
        return named_parameters(self.model)

    def save(self, directory: Path) -> None:
        """Rank 0 writes weights and optimiser state, equal on all ranks, and the random state of each rank."""
        tensors = gather_rng()
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        tensors["steps"] = torch.tensor(self._steps)
        tensors |= number_tensors(self._passes.numbers)
        for name, parameter in self._named_state().items():
            tensors[f"model.{name}"] = parameter.detach().cpu()
        for name, parameter in self.model.named_parameters():
            for key, value in self._optimizer.state.get(self._master(parameter), {}).items():
                tensors[f"optimizer.{name}.{key}"] = value.cpu()
        write_tensors(directory, tensors)

    def load(self, directory: Path) -> None:
        tensors = read_tensors(directory)
        own = {f"model.{name}": parameter for name, parameter in self._named_state().items()}
        saved = {name: tensor.shape for name, tensor in tensors.items() if name.startswith("model.")}
        if saved != {name: tensor.shape for name, tensor in own.items()} or "steps" not in tensors:
            raise EngineError(f"{directory} holds the state of another model; was the run's model changed?")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(tensors[name])
        if self._masters is not None:
            self._masters.write()
        self._optimizer.state.clear()
        for name, narrow in self.model.named_parameters():
            parameter, start = self._master(narrow), f"optimizer.{name}."
            state = {key.removeprefix(start): value for key, value in tensors.items() if key.startswith(start)}
            if state:
                self._optimizer.state[parameter] = optimizer_state(parameter, state)
        self._steps = int(tensors["steps"])
        self._passes.restore_numbers(numbers_of(tensors))
        self.discard()
        restore_rng(tensors)

    def export(self, directory: Path) -> None:
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        # Copy everything but the weights, which are shared if their dtype matches; tied weights stay tied.
        weights = {
            id(parameter): torch.nn.Parameter(
                self._master(parameter).detach().to("cpu", self._final_dtype), requires_grad=False
            )
            for parameter in self.model.parameters()
        }
        model = copy.deepcopy(self.model, weights)
        if self._generation:  # written as it was read: transformers refuses to write values that it would not use
            model.generation_config = GenerationConfig()
        model.save_pretrained(directory, max_shard_size=int(self._options.file_gb * 1e9))
        if self._generation:
            (directory / GENERATION).write_text(self._generation)

    def discard(self) -> None:
        self._deferred.clear()
        self._optimizer.zero_grad(set_to_none=True)
        self._passes.reset()

    def _named_state(self) -> dict[str, torch.Tensor]:
        """Parameters (of trained ones, what the optimiser updates) and buffers by name; tied parameters once."""
        parameters = {name: self._master(parameter) for name, parameter in self.model.named_parameters()}
        return {**parameters, **dict(self.model.named_buffers())}

    @staticmethod
    def _gradient(parameter: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _summed_over_ranks(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """The sums over all ranks, by one call. Collective."""
    whole = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(whole)
    parts = whole.split([gradient.numel() for gradient in gradients])
    return [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]
