"""A training engine on plain PyTorch: data-parallel ranks that accumulate at their own pace and meet once a step.

Every micro-batch adds the gradient of a *sum* of token losses; only the step divides, by the token count of all
micro-batches of all ranks. How a step was cut therefore cannot change its gradient.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flowrt.algorithms import GrpoLoss, cut_by_tokens, grpo_token_loss_sum, mismatch_statistics, truncated_importance
from flowrt.engines.checkpoint import named_parameters
from flowrt.engines.options import TrainOptions
from flowrt.engines.protocols import TrainingBatch
from flowrt.engines.scoring import response_logprobs
from flowrt.engines.state import gather_rng, read_tensors, restore_rng, write_tensors
from flowrt.errors import EngineError

SUMS = (
    "tokens",
    "samples",
    "loss",
    "surprise",
    "mismatch_kl_k1",
    "mismatch_kl_k3",
    "mismatch_capped_fraction",
    "kl",
    "ratio",
    "clipped_low",
    "clipped_high",
)
"""What is summed over a step's micro-batches and ranks; all but the first two become means per token."""


class TorchTrainer:
    """AdamW on the GRPO loss. With more than one rank, `torch.distributed` must be initialised."""

    def __init__(self, model: Any, options: TrainOptions, loss: GrpoLoss, *, correction_cap: float, temperature: float):
        self.model = model.train()
        self._options = options
        self._loss = loss
        self._cap = correction_cap
        self._temperature = temperature
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=options.lr, betas=(options.beta1, options.beta2), weight_decay=options.weight_decay
        )
        self.on_gradient: Callable[[torch.Tensor], None] | None = None  # sees each step's global gradient
        self._steps = 0
        self._sums: dict[str, float] = defaultdict(float)

    def accumulate(self, batch: TrainingBatch) -> None:
        lengths = [len(p) + len(r) for p, r in zip(batch.prompts, batch.responses, strict=True)]
        for rows in cut_by_tokens(lengths, self._options.forward_tokens):
            self._accumulate_rows(batch, rows)

    def _accumulate_rows(self, batch: TrainingBatch, rows: list[int]) -> None:
        logprobs_T, padded = response_logprobs(
            self.model,
            [batch.prompts[row] for row in rows],
            [batch.responses[row] for row in rows],
            self._temperature,
        )
        sample_T = padded.sample_T
        old_T = logprobs_T.detach()
        rollout_T = torch.cat([batch.rollout_logprobs[row] for row in rows])
        importance_T = truncated_importance(old_T, rollout_T, cap=self._cap)
        reference_T = None
        if batch.reference_logprobs is not None:
            reference_T = torch.cat([batch.reference_logprobs[row] for row in rows])
        result = grpo_token_loss_sum(
            logprobs_T,
            old_T,
            batch.advantages_N[rows],
            sample_T,
            loss=self._loss,
            rollout_weights_T=importance_T * batch.weights_N[rows][sample_T],
            reference_T=reference_T,
        )
        result.loss_sum.backward()
        mismatch = mismatch_statistics(old_T, rollout_T, importance_T)
        self._sums["tokens"] += result.tokens
        self._sums["samples"] += len(rows)
        self._sums["loss"] += float(result.loss_sum.detach())
        self._sums["surprise"] -= float(old_T.sum())
        for name in ("kl_k1", "kl_k3", "capped_fraction"):
            self._sums[f"mismatch_{name}"] += mismatch[name] * result.tokens
        for name, value in result.metric_sums().items():
            self._sums[name.removesuffix("_sum")] += float(value)

    def step(self) -> dict[str, float]:
        sums = self._global_sums()
        tokens, samples = sums.pop("tokens"), sums.pop("samples")
        if not tokens:
            return {}
        gradient = torch.cat([self._gradient(parameter).reshape(-1) for parameter in self._parameters])
        if _ranks() > 1:
            dist.all_reduce(gradient)
        gradient /= tokens
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
        lr = self._options.lr * min(1.0, (self._steps + 1) / max(self._options.warmup_steps, 1))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._steps += 1
        self._sums.clear()
        means = {name: value / tokens for name, value in sums.items()}
        return {**means, "grad_norm": norm, "lr": lr, "response_length": tokens / samples}

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

    def discard(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._sums.clear()

    def _named_state(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers, each once."""
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    @staticmethod
    def _gradient(parameter: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    def _global_sums(self) -> dict[str, float]:
        """The step's sums over all ranks; one that got no micro-batch adds zeros."""
        totals = torch.tensor([self._sums[name] for name in SUMS], dtype=torch.float64)
        if _ranks() > 1:
            dist.all_reduce(totals)
        return dict(zip(SUMS, totals.tolist(), strict=True))


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
