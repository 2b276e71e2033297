"""A training engine on FSDP2: parameters, gradients and optimiser state are sharded over the ranks.

Ranks pull micro-batches at their own pace, so their numbers of passes differ. In FSDP2 every forward pass is a
collective, in which ranks with different numbers of passes deadlock. Two modes avoid that:

* ``gather="step"``: all parameters are gathered once, right after an optimiser step, and kept until the next. Passes
  are local and accumulate full gradients. `step` then makes one dummy pass on all ranks, over two tokens with a zero
  gradient, which makes FSDP2 reduce the accumulated gradients. In addition to its shards each rank holds the full
  parameters (4 bytes each, 2 in bfloat16) and their full gradients (4 bytes each).
* ``gather="pass"``: parameters are gathered layer by layer and gradients reduced in each pass. Before each pass the
  ranks agree whether any rank has work left; ranks without work make a dummy pass. Only shards are kept. A rank that
  waits for samples is exempt from the barrier (`RankBarrier`); the pull has its own deadline.
"""

import statistics
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from flowrt.algorithms.algorithm import Algorithm
from flowrt.engines.base import TrainingBatch
from flowrt.engines.exported_model import ADAPTER, write_weights
from flowrt.engines.fsdp import checkpoint, sharding
from flowrt.engines.hf import export_dtype, model_name, set_training_mode
from flowrt.engines.options import FsdpOptions, LoraOptions, TrainOptions
from flowrt.engines.training.deferred import DeferredStep
from flowrt.engines.training.forward import apply_optimizations
from flowrt.engines.training.lora import adapted_names, merge_adapters, write_adapters
from flowrt.engines.training.loss_passes import LossPasses
from flowrt.engines.training.optimizer import adamw, check_finite, optimizer_step
from flowrt.ranks.barrier import RankBarrier
from flowrt.transport.devices import Device


class FsdpTrainer:
    """AdamW on the terms of an algorithm, over all ranks of `torch.distributed`, which must be initialised.

    The constructor and all methods but `accumulate` are collective: every rank calls them, in the same order.

    Args:
        source: directory of the initial model.
        device: device of this rank.
        options: options of the optimiser and of forward passes.
        algorithm: the objective.
        fsdp: options of sharding; None: the defaults.
        lora: options of adapters; None: all weights are trained.
        temperature: sampling temperature.
        seed: seed of the initial adapters.

    Raises:
        EngineError: if the model cannot be loaded.
        ConfigError: if adapters cannot be added.
        WaitExpired: if a rank is lost.
    """

    applies_supports = True

    def __init__(
        self,
        source: Path,
        device: Device,
        options: TrainOptions,
        algorithm: Algorithm,
        *,
        fsdp: FsdpOptions | None = None,
        lora: LoraOptions | None = None,
        temperature: float,
        seed: int = 0,
    ) -> None:
        device.use()
        self._source = source
        self._device = device
        self._options = options
        self._fsdp = fsdp or FsdpOptions()
        self._lora = lora or LoraOptions()
        self._passes = LossPasses(algorithm, temperature=temperature, forward_tokens=options.forward_tokens)
        model = sharding.load_sharded(source, device, self._fsdp, self._lora, seed)
        self.model = set_training_mode(model, dropout=options.dropout)
        # The optimiser works on the shards, whether or not the modules hold gathered parameters at the moment.
        self._shards = {name: shard for name, shard in self.model.named_parameters() if shard.requires_grad}
        self._optimizer = adamw(list(self._shards.values()), options, device.kind)
        self._deferred = DeferredStep(self._passes)
        self._steps = 0
        self._is_checked = False  # whether rollout and trainer were compared at equal weights
        self._lr = 0.0
        self._barrier = RankBarrier("passes")
        self._final_dtype = export_dtype(source, options.final_dtype)
        self._start_step()
        apply_optimizations(self.model, options)
        if self._lock_step:  # the check of `enable_packing` may have failed with parameters gathered
            sharding.scatter(self.model)

    def accumulate(self, batch: TrainingBatch) -> None:
        self._device.use()
        self._passes.note_batch()
        if self._passes.is_deferred:
            self._deferred.add(self.model, batch, self._announce_pass)
            return
        for rows in self._passes.cut(self.model, batch):
            self._announce_pass()
            self._passes.loss_sum(self.model, batch, rows).backward()

    def step(self) -> dict[str, float]:
        self._device.use()
        norms = []
        if self._passes.is_deferred:
            norms = self._deferred_updates()
        else:
            self._reduce()
        sums = self._passes.global_sums()
        if not sums["tokens"]:
            self._steps += bool(sums["batches"])
            self._start_step()
            return self._passes.untrained_metrics(sums, self._lr)
        if not self._passes.is_deferred:
            norms = [self._update(sums[self._passes.denominator])]
        self._steps += 1
        self._start_step()
        return self._passes.step_metrics(sums, statistics.fmean(norms), self._lr)

    def _deferred_updates(self) -> list[float]:
        """Make the optimiser updates of a deferred step. Returns the gradient norms. Collective."""
        self._finish_forward_passes()
        batch, updates = self._deferred.complete()
        norms = []
        for number, update in enumerate(updates):
            if number:
                self._gather()
            for rows in self._passes.cut(self.model, batch, update.rows):
                self._announce_pass()
                self._passes.loss_sum(self.model, batch, rows, update.context).backward()
            self._reduce()
            norms.append(self._update(1.0, number))
        return norms

    def _update(self, divisor: float, number: int = 0) -> float:
        """Make one optimiser update with the gradient over ``divisor``. Returns its norm. Collective."""
        if not self._is_checked:
            self._passes.check_equal_weights(self._options.max_initial_mismatch, model_name(self.model))
            self._is_checked = True
        gradients = [sharding.local_shard(shard.grad) for shard in self._shards.values() if shard.grad is not None]
        for gradient in gradients:
            gradient /= divisor
        norm = check_finite(self._norm(gradients), self._steps, number)
        if norm > self._options.max_grad_norm:
            for gradient in gradients:
                gradient *= self._options.max_grad_norm / norm
        self._lr = optimizer_step(self._optimizer, self._options, self._steps)
        return norm

    def discard(self) -> None:
        self._device.use()
        if self._passes.is_deferred:
            self._finish_forward_passes()
        else:
            self._reduce()
        self._start_step()

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """On rank 0 the full weights or only the adapters, as configured; empty on the other ranks."""
        self._device.use()
        adapters_only = bool(self._lora.rank) and self._lora.publish == "adapters"
        merging = bool(self._lora.rank) and not adapters_only
        dtype = getattr(torch, self._fsdp.dtype)
        unrounded = adapted_names(self.model) if merging else frozenset()
        tensors = {}
        for name, tensor in sharding.full_tensors(self.model, trained_only=adapters_only):
            if dist.get_rank() == 0:
                # Temporary tensors go to the host one by one: the device may not have room for all of them.
                kept = sharding.master_dtype(self._fsdp) if name in unrounded else dtype
                tensors[name] = tensor.to("cpu", kept) if self._lock_step or merging else tensor
            del tensor
        if not merging or not tensors:
            return tensors
        return {name: tensor.to(dtype) for name, tensor in merge_adapters(self.model, tensors).items()}

    def save(self, directory: Path) -> None:
        self._device.use()
        checkpoint.save(directory, self._shards, self._optimizer, self._steps, numbers=self._passes.numbers)

    def load(self, directory: Path) -> None:
        self._device.use()
        self._reduce()
        self._steps, numbers = checkpoint.load(directory, self._shards, self._optimizer, numbers=self._passes.numbers)
        self._passes.restore_numbers(numbers)
        self._start_step()

    def export(self, directory: Path) -> None:
        self._device.use()
        sharding.scatter(self.model)
        tensors = sharding.full_state_on_rank0(self.model)
        self._start_step()  # before rank 0 writes, so that no rank waits for the disk of rank 0 inside a collective
        if dist.get_rank() == 0:
            full = merge_adapters(self.model, tensors) if self._lora.rank else tensors
            write_weights(self._source, full, directory, self._final_dtype, self._options.file_gb)
            if self._lora.rank:
                write_adapters(self.model, tensors, self._source, directory / ADAPTER)

    @property
    def _lock_step(self) -> bool:
        return self._fsdp.gather == "pass"

    def _start_step(self) -> None:
        """Discard the samples and metrics of the last step, and gather the present parameters."""
        self._deferred.clear()
        self._passes.reset()
        self._gather()

    def _gather(self) -> None:
        """Reset gradients; with gather="step", gather the parameters."""
        self._optimizer.zero_grad(set_to_none=True)
        if not self._lock_step:
            self.model.set_requires_gradient_sync(False)
            self.model.set_reshard_after_backward(False)
            sharding.gather(self.model)

    def _reduce(self) -> None:
        """Reduce the gradients of all ranks into their shards, and free gathered parameters."""
        if self._lock_step:
            while self._any_rank_has_work(has_work=False):
                self._dummy_pass()
            return
        self.model.set_requires_gradient_sync(True)
        self.model.set_reshard_after_backward(True)
        self._dummy_pass()

    def _announce_pass(self) -> None:
        """In lock step, let the other ranks take part in this rank's next pass. Collective."""
        if self._lock_step:
            self._any_rank_has_work(has_work=True)

    def _finish_forward_passes(self) -> None:
        """In lock step, take part in the remaining forward passes of other ranks in a deferred step. Collective."""
        while self._lock_step and self._passes.needs_forward and self._any_rank_has_work(has_work=False):
            with torch.no_grad():
                self.model(input_ids=self._dummy_tokens(), use_cache=False)

    def _dummy_tokens(self) -> torch.Tensor:
        return torch.zeros(1, 2, dtype=torch.long, device=self._device.torch)

    def _dummy_pass(self) -> None:
        """A forward and backward pass with a zero gradient, which runs FSDP2's hooks."""
        logits = self.model(input_ids=self._dummy_tokens(), use_cache=False).logits
        logits.backward(torch.zeros_like(logits))

    def _any_rank_has_work(self, *, has_work: bool) -> bool:
        """Whether any rank has work for the next pass. Collective."""
        self._barrier.arrive("a pass")
        count = torch.tensor([int(has_work)])
        dist.all_reduce(count)
        return bool(count)

    @staticmethod
    def _norm(gradients: list[torch.Tensor]) -> float:
        """Global norm of gradients that are sharded over the ranks. Collective."""
        squared = torch.nn.utils.get_total_norm(gradients).square()
        dist.all_reduce(squared)
        return float(squared.sqrt())
