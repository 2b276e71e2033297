"""A trainer of your own in a GRPO run: the plain policy gradient and SGD, in place of clipped ratios and AdamW."""

import asyncio
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from flowrt import grpo


class PolicyGradient:
    """For one rank. With several, `step` would have to sum gradients and tokens over them with torch.distributed."""

    def __init__(self, config: grpo.RunConfig) -> None:
        self._model = grpo.load_model(grpo.model_dir(config)).train()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.3)
        self._temperature, self._clip, self._tokens = config.rollout.temperature, config.trainer.max_grad_norm, 0

    def accumulate(self, batch: grpo.TrainingBatch) -> None:
        logprobs_T, padded = grpo.response_logprobs(self._model, batch.prompts, batch.responses, self._temperature)
        (-logprobs_T * batch.advantages_N[padded.sample_T]).sum().backward()  # a sum: `step` divides by the tokens
        self._tokens += len(logprobs_T)

    def step(self) -> dict[str, float]:
        if not self._tokens:
            return {}
        for parameter in self._model.parameters():
            parameter.grad /= self._tokens
        norm = float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip))
        self._optimizer.step()
        self.discard()
        return {"grad_norm": norm}

    def discard(self) -> None:
        self._optimizer.zero_grad()
        self._tokens = 0

    def parameters(self) -> Mapping[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self._model.named_parameters()}

    def save(self, directory: Path) -> None:
        save_file(dict(self.parameters()), directory / "weights.safetensors")

    def load(self, directory: Path) -> None:
        self._model.load_state_dict(load_file(directory / "weights.safetensors"), strict=False)

    def export(self, directory: Path) -> None:
        self._model.save_pretrained(directory)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as run_dir:
        config = grpo.parse(["arithmetic", "--steps", "30", "--run-dir", run_dir, *sys.argv[1:]])
        summary = asyncio.run(grpo.run_recipe(config, train_engine=PolicyGradient))
    print(f"{summary['steps']} steps, mean reward {summary['reward_first']:.3f} -> {summary['reward_last']:.3f}")
