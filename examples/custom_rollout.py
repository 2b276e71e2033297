"""A rollout engine of your own in a GRPO run: it recomputes the whole sequence for each new token."""

import asyncio
import sys
import tempfile
from collections.abc import Sequence

import torch

from flowrt import grpo


class Simple:
    """Generates up to 32 sequences at a time, without a KV cache, to keep the example short."""

    def __init__(self, config: grpo.RunConfig) -> None:
        self._model = grpo.load_model(grpo.model_dir(config)).eval()
        self._stop_ids, self._version = grpo.stop_token_ids(grpo.model_dir(config)), 0
        self._longest, self._temperature = config.rollout.max_new_tokens, config.rollout.temperature
        self._running: list[tuple[grpo.Prompt, list[int], list[float], torch.Generator]] = []

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def room(self) -> int:
        return 32 - self.running

    def add(self, prompts: Sequence[grpo.Prompt]) -> None:
        self._running += [(prompt, [], [], torch.Generator().manual_seed(prompt.seed)) for prompt in prompts]

    @torch.inference_mode()
    def run(self, interrupt: grpo.Interrupt) -> list[grpo.Response]:
        finished: list[grpo.Response] = []
        while self._running and not finished and not interrupt.is_set():
            rows = [torch.cat([prompt.tokens.long(), torch.tensor(ids).long()]) for prompt, ids, _, _ in self._running]
            logits_RLV = self._model(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), use_cache=False).logits
            for row, (prompt, ids, logprobs, generator) in enumerate(list(self._running)):
                scores_V = (logits_RLV[row, len(rows[row]) - 1] / self._temperature).log_softmax(0)
                drawn = scores_V.argmax() if prompt.greedy else scores_V.exp().multinomial(1, generator=generator)
                ids.append(int(drawn))
                logprobs.append(float(scores_V[drawn]))
                if (ended := ids[-1] in self._stop_ids) or len(ids) == self._longest:
                    self._running.remove((prompt, ids, logprobs, generator))
                    tokens, spans = torch.tensor(ids, dtype=torch.int32), (self._version, len(ids))
                    finished.append(grpo.Response(prompt.key, tokens, torch.tensor(logprobs), spans, not ended))
        return finished

    def swap(self, snapshot: grpo.Snapshot) -> None:
        snapshot.restore({name: parameter.detach() for name, parameter in self._model.named_parameters()})
        self._version = snapshot.version  # no sequence runs now, unless config.rollout.weight_update is in_flight


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as run_dir:
        config = grpo.parse(["arithmetic", "--steps", "30", "--run-dir", run_dir, *sys.argv[1:]])
        summary = asyncio.run(grpo.run_recipe(config, rollout_engine=Simple))
    print(f"{summary['steps']} steps, mean reward {summary['reward_first']:.3f} -> {summary['reward_last']:.3f}")
