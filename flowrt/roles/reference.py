"""The reference role: log-probabilities of responses under the initial model, or under a refreshed one."""

from collections.abc import Sequence
from typing import Any

import torch

from flowrt.client.sample_tensors import Batch
from flowrt.client.session import Session
from flowrt.client.streams import PULL_INTERVAL_S, StageOutput, run_stage
from flowrt.engines.hf import load_model, weight_bytes
from flowrt.engines.training.architecture import check_training
from flowrt.engines.training.forward import enable_packing, score
from flowrt.engines.training.fused_head import enable_fused_head
from flowrt.ids import REFERENCE
from flowrt.recipes.config import RunConfig
from flowrt.recipes.devices import reference_device, reference_dtype
from flowrt.recipes.run_dir import reference_model_dir
from flowrt.roles.main import main
from flowrt.roles.reference_weights import RefreshedModel, refresh_step
from flowrt.runtime.compute_thread import ComputeThread
from flowrt.runtime.time_limits import pass_s, weights_s
from flowrt.transport.devices import Device, own_device

MAX_PULL_SLOTS = 64


async def run(session: Session, config: RunConfig) -> None:
    """Score responses until the run ends; commits ``ref_logprobs`` ([T] float32 per slot, in nats).

    With ``reference.refresh`` it also commits ``reference_version``, the step of the weights that scored the slot.
    """
    device = own_device(reference_device(config))
    if config.deterministic:
        device.compute_deterministically()
    model_bytes = weight_bytes(reference_model_dir(config))
    thread = ComputeThread()
    with session.timeline.busy("load"), session.progress.expected(weights_s(model_bytes)):
        model = await thread.run(load_reference, config, device)
    refreshed, every = RefreshedModel(config, model), config.reference.refresh
    # One sample per pass: shapes, and hence rounding, do not depend on the other samples of the pull.
    budget_tokens = 1 if config.deterministic else config.trainer.forward_tokens

    async def score_batch(batch: Batch) -> StageOutput:
        steps = [refresh_step(batch.oldest_version(row), every) if every else 0 for row in range(len(batch))]
        tokens = sum(map(len, batch.tensors["prompt"])) + sum(map(len, batch.tensors["response"]))
        # Weights may be loaded first, to score by a refreshed reference.
        limit_s = pass_s(tokens, model_bytes) + len(set(steps)) * weights_s(model_bytes)
        with session.timeline.busy("reference"), session.progress.expected(limit_s):
            logprobs = await thread.run(
                score_by_refresh,
                device,
                refreshed,
                steps,
                batch.tensors["prompt"],
                batch.tensors["response"],
                temperature=config.rollout.temperature,
                budget_tokens=budget_tokens,
            )
        inline = {"reference_version": [float(step) for step in steps]} if every else {}
        return StageOutput({"ref_logprobs": logprobs}, inline)

    await run_stage(session, "reference", MAX_PULL_SLOTS, score_batch, PULL_INTERVAL_S)


def score_by_refresh(
    device: Device,
    refreshed: RefreshedModel,
    steps: Sequence[int],
    prompts: Sequence[torch.Tensor],
    responses: Sequence[torch.Tensor],
    *,
    temperature: float,
    budget_tokens: int,
) -> list[torch.Tensor]:
    """As `score_on`, but each sample is scored by the weights of its refresh.

    ``steps`` has the step of the refresh of each sample; 0: the initial weights. Raises EngineError if weights cannot
    be loaded.
    """
    logprobs: dict[int, torch.Tensor] = {}
    for step in sorted(set(steps)):
        device.use()
        refreshed.use(step)
        rows = [row for row, row_step in enumerate(steps) if row_step == step]
        some = [prompts[row] for row in rows], [responses[row] for row in rows]
        logprobs |= dict(zip(rows, score_on(device, refreshed.model, *some, temperature, budget_tokens), strict=True))
    return [logprobs[row] for row in range(len(steps))]


def load_reference(config: RunConfig, device: Device) -> Any:
    """The reference model with its initial weights, on ``device``, in the configured dtype."""
    device.use()
    dtype: torch.dtype = getattr(torch, reference_dtype(config))
    model = load_model(reference_model_dir(config), str(device.torch), dtype).eval()
    check_training(model)
    enable_fused_head(model)
    if config.trainer.share_prompts:
        enable_packing(model)
    return model


def score_on(
    device: Device,
    model: Any,
    prompts: Sequence[torch.Tensor],
    responses: Sequence[torch.Tensor],
    temperature: float,
    budget_tokens: int,
) -> list[torch.Tensor]:
    """Log-probabilities of each response ([T] float32, in nats, on the CPU), computed in any thread; see `score`."""
    device.use()
    scored = score(model, prompts, responses, temperature, budget_tokens)
    if not scored:
        return []
    lengths = [len(logprobs) for logprobs in scored]
    return [logprobs.clone() for logprobs in torch.cat(scored).cpu().split(lengths)]  # one wait for the device


def start() -> None:
    """Entry point of the worker process."""
    main(REFERENCE, run, drains=True)


if __name__ == "__main__":
    start()
