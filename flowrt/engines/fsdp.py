"""A training engine on FSDP2: parameters, gradients and optimiser state live in shards over the ranks.

Ranks pull micro-batches at their own pace, so one may have five of them while another has none. FSDP2 makes every
forward pass a collective, in which ranks would wait for each other for ever. There are two ways out:

* ``gather="step"``: all parameters are gathered once, right after an optimiser step, and stay whole until the next.
  Passes are local and gradients are added up whole. `step` then makes one more pass, on all ranks alike, over two
  tokens with a gradient of zero: its only purpose is that FSDP2 reduces what has been added up. Beside its shards each
  rank holds the whole parameters (4 bytes each, 2 in bfloat16) and their whole gradients (4 bytes each).
* ``gather="pass"``: parameters are gathered layer by layer and gradients reduced in each pass. Before each pass the
  ranks agree whether anyone still has work; whoever has none makes a pass without effect. Only shards stay. One that
  waits for samples is waited for: it is excused (`RollCall`), and they have a deadline of their own.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from flowrt.algorithms import GrpoLoss
from flowrt.engines import sharded_state, sharding
from flowrt.engines.checkpoint import without_dropout, written_dtype
from flowrt.engines.faster import made_fast
from flowrt.engines.lora import merged
from flowrt.engines.options import FsdpOptions, LoraOptions, TrainOptions
from flowrt.engines.passes import LossPasses, finite, step_metrics
from flowrt.engines.protocols import TrainingBatch
from flowrt.engines.roll_call import RollCall
from flowrt.engines.schedules import learning_rate
from flowrt.transport.devices import Device


class FsdpTrainer:
    """AdamW on the GRPO loss, over all ranks of `torch.distributed`, which must be initialised.

    All methods but `accumulate` are collective: every rank calls them, in the same order.
    """

    def __init__(
        self,
        source: Path,
        device: Device,
        options: TrainOptions,
        loss: GrpoLoss,
        *,
        fsdp: FsdpOptions | None = None,
        lora: LoraOptions | None = None,
        correction_cap: float,
        temperature: float,
        seed: int = 0,
    ) -> None:
        device.use()
        self._source = source
        self._device = device
        self._options = options
        self._fsdp = fsdp or FsdpOptions()
        self._lora = lora or LoraOptions()
        self._passes = LossPasses(
            loss, correction_cap=correction_cap, temperature=temperature, forward_tokens=options.forward_tokens
        )
        self.model = without_dropout(sharding.load_sharded(source, device, self._fsdp, self._lora, seed)).train()
        # The shards: what the optimiser works on, whatever the model's modules hold at the moment.
        self._shards = {name: shard for name, shard in self.model.named_parameters() if shard.requires_grad}
        self._optimizer = torch.optim.AdamW(
            list(self._shards.values()),
            lr=options.lr,
            betas=(options.beta1, options.beta2),
            weight_decay=options.weight_decay,
            fused=fused(device.kind),
        )
        self._steps = 0
        self._roll = RollCall("passes")
        self._final_dtype = written_dtype(source, options.final_dtype)
        self._begin()
        made_fast(self.model, options)
        if self._lock_step:  # a model that did not take the samples it was tried with stopped half-way
            sharding.scatter(self.model)

    def accumulate(self, batch: TrainingBatch) -> None:
        self._device.use()
        for rows in self._passes.cut(self.model, batch):
            if self._lock_step:
                self._anyone(has_work=True)
            self._passes.loss_sum(self.model, batch, rows).backward()

    def step(self) -> dict[str, float]:
        self._device.use()
        self._reduce()
        sums = self._passes.global_sums()
        if not sums["tokens"]:
            self._begin()
            return {}
        gradients = [sharding.own_part(shard.grad) for shard in self._shards.values() if shard.grad is not None]
        for gradient in gradients:
            gradient /= sums["tokens"]
        norm = finite(self._norm(gradients), self._steps)
        if norm > self._options.max_grad_norm:
            for gradient in gradients:
                gradient *= self._options.max_grad_norm / norm
        lr = learning_rate(self._options, self._steps)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._steps += 1
        self._begin()
        return step_metrics(sums, norm, lr)

    def discard(self) -> None:
        self._device.use()
        self._reduce()
        self._begin()

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """What rollout workers need: whole weights, or adapters alone; on the other ranks than 0, nothing."""
        self._device.use()
        alone = bool(self._lora.rank) and self._lora.publish == "adapters"
        merging = bool(self._lora.rank) and not alone
        dtype = getattr(torch, self._fsdp.dtype)
        tensors = {}
        for name, tensor in sharding.whole_tensors(self.model, trained_only=alone):
            if dist.get_rank() == 0:
                # What is made here goes to the host at once: there need not be room for all of it on the device.
                tensors[name] = tensor.to("cpu", dtype) if self._lock_step or merging else tensor
            del tensor
        return merged(tensors, self._lora) if merging else tensors

    def save(self, directory: Path) -> None:
        self._device.use()
        sharded_state.save(directory, self._shards, self._optimizer, self._steps)

    def load(self, directory: Path) -> None:
        self._device.use()
        self._reduce()
        self._steps = sharded_state.load(directory, self._shards, self._optimizer)
        self._begin()

    def export(self, directory: Path) -> None:
        self._device.use()
        sharding.scatter(self.model)
        tensors = sharding.whole_on_first(self.model)
        self._begin()  # before rank 0 writes: the others must not wait for its disk inside a collective
        if dist.get_rank() == 0:
            sharding.export(tensors, self._source, directory, self._fsdp, self._lora, self._final_dtype)

    @property
    def _lock_step(self) -> bool:
        return self._fsdp.gather == "pass"

    def _begin(self) -> None:
        """Begin a step: no gradient, no sums, and parameters whole if they are to be."""
        self._optimizer.zero_grad(set_to_none=True)
        self._passes.forget()
        if not self._lock_step:
            self.model.set_requires_gradient_sync(False)
            self.model.set_reshard_after_backward(False)
            sharding.gather(self.model)

    def _reduce(self) -> None:
        """Sum the gradients of all ranks, into their shards; parameters are sharded afterwards."""
        if self._lock_step:
            while self._anyone(has_work=False):
                self._pass_without_effect()
            return
        self.model.set_requires_gradient_sync(True)
        self.model.set_reshard_after_backward(True)
        self._pass_without_effect()

    def _pass_without_effect(self) -> None:
        """A forward and a backward pass that every hook of FSDP2 sees, and that adds a gradient of zero."""
        tokens = torch.zeros(1, 2, dtype=torch.long, device=self._device.torch)
        logits = self.model(input_ids=tokens, use_cache=False).logits
        logits.backward(torch.zeros_like(logits))

    def _anyone(self, *, has_work: bool) -> bool:
        """Whether any rank has work for the next pass; ranks wait for each other here."""
        self._roll.here("a pass")
        count = torch.tensor([int(has_work)])
        dist.all_reduce(count)
        return bool(count)

    @staticmethod
    def _norm(gradients: list[torch.Tensor]) -> float:
        """Of all gradients together, of which each rank has its part."""
        squared = torch.nn.utils.get_total_norm(gradients).square()
        dist.all_reduce(squared)
        return float(squared.sqrt())


def fused(kind: str) -> bool | None:
    """Whether AdamW is one operation for all parameters; None: as PyTorch has it, which is several on an accelerator.

    On a CPU it would be ten for each parameter, every one of them taken apart by DTensor.
    """
    return True if kind == "cpu" else None
