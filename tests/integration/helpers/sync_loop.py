"""GRPO as a plain synchronous loop in one process: what a run at staleness 0 must equal, bit for bit.

Generate a whole batch, reward it, score it under the reference, train on it, repeat. No controller, no lanes, no
versions, no pulls: only the engine's forward pass and the algorithms are flowrt's.
"""

import random
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrt.algorithms.advantages import GroupAdvantages
from flowrt.algorithms.algorithm import Groups
from flowrt.engines.base import Prompt, Response, TrainingBatch, sample_seed
from flowrt.engines.hf import load_model, load_tokenizer
from flowrt.engines.stopping import StopConditions
from flowrt.engines.torch.rollout import TorchRollout
from flowrt.engines.torch.trainer import TorchTrainer
from flowrt.engines.training.forward import enable_packing, score
from flowrt.recipes.config import RunConfig
from flowrt.recipes.config_io import from_toml
from flowrt.recipes.run_dir import model_dir
from flowrt.recipes.tasks.registry import task_of
from flowrt.roles.algorithm import algorithm

Group = dict[str, Any]


def groups_of(micro_batch: list[Any], rewards_N: Tensor, groups_N: Tensor) -> Groups:
    """The groups of a micro-batch."""
    lengths = [len(tokens) for group in micro_batch for tokens in group["responses"]]
    return Groups(
        rewards_N=rewards_N,
        group_N=groups_N,
        lengths_N=torch.tensor(lengths),
        truncated_N=torch.zeros(len(lengths), dtype=torch.bool),
        staleness_N=torch.zeros(len(lengths), dtype=torch.int64),
    )


def generate(policy: Any, tokenizer: Any, config: RunConfig, prompt: torch.Tensor, index: int, member: int) -> Response:
    engine = TorchRollout(
        policy,
        stop=StopConditions((tokenizer.eos_token_id,)),
        rows=1,
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
    )
    engine.add([Prompt(0, prompt, sample_seed(config.seed, index, 0, member, 0))])
    responses: list[Response] = []
    while not responses:
        responses = engine.run(threading.Event())
    return responses[0]


def micro_batches(groups: list[Group], budget: int) -> list[list[Group]]:
    """Groups in order, cut as soon as a micro-batch holds ``budget`` tokens."""
    batches: list[list[Group]] = [[]]
    tokens = 0
    for group in groups:
        if tokens >= budget:
            batches.append([])
            tokens = 0
        batches[-1].append(group)
        tokens += sum(len(group["prompt"]) + len(response) for response in group["responses"])
    return batches


def sync_loop(config: RunConfig, model: Path) -> dict[str, torch.Tensor]:
    """Train and return the final weights by name."""
    torch.set_num_threads(1)
    problems, tokenizer = task_of(config).training_problems(), load_tokenizer(model)
    policy, reference = load_model(model), load_model(model).eval()
    assert enable_packing(reference)
    loss = algorithm(config)
    trainer = TorchTrainer(policy, config.trainer, loss, temperature=config.rollout.temperature)
    order = list(range(len(problems)))
    random.Random(f"order {config.seed} 0").shuffle(order)
    for step in range(config.steps):
        groups = []
        for index in order[step * config.prompts_per_step : (step + 1) * config.prompts_per_step]:
            prompt = torch.tensor(tokenizer(problems[index].prompt)["input_ids"], dtype=torch.int32)
            generated = [generate(policy, tokenizer, config, prompt, index, m) for m in range(config.group_size)]
            rewards = []
            for response in generated:
                ids = response.tokens.tolist()
                text = "" if response.truncated else tokenizer.decode(ids, skip_special_tokens=True)
                rewards.append(task_of(config).reward(text, problems[index].answer))
            tokens = [response.tokens for response in generated]
            scored = score(reference, [prompt] * len(generated), tokens, config.rollout.temperature, 1)
            logprobs = [response.logprobs for response in generated]
            groups.append(
                {"prompt": prompt, "responses": tokens, "logprobs": logprobs, "scored": scored, "rewards": rewards}
            )
        policy.train()
        trained = 0
        for micro_batch in micro_batches(groups, config.trainer.micro_batch_tokens):
            rewards_N = torch.tensor([reward for group in micro_batch for reward in group["rewards"]])
            groups_N = torch.tensor(
                [number for number, group in enumerate(micro_batch, trained) for _ in group["rewards"]]
            )
            trained += len(micro_batch)
            trainer.accumulate(
                TrainingBatch(
                    prompts=[group["prompt"] for group in micro_batch for _ in group["responses"]],
                    responses=[tokens for group in micro_batch for tokens in group["responses"]],
                    rollout_logprobs=[
                        sample_logprobs for group in micro_batch for sample_logprobs in group["logprobs"]
                    ],
                    reference_logprobs=[
                        sample_logprobs for group in micro_batch for sample_logprobs in group["scored"]
                    ],
                    advantages_N=GroupAdvantages()(groups_of(micro_batch, rewards_N, groups_N)).advantages_N,
                    weights_N=torch.ones(len(rewards_N)),
                    groups_N=groups_N,
                )
            )
        trainer.step()
    return {name: tensor.clone() for name, tensor in trainer.parameters().items()}


if __name__ == "__main__":
    # In a separate process: the thread settings of the caller must not affect the arithmetic.
    run_dir, out = Path(sys.argv[1]), Path(sys.argv[2])
    config = from_toml((run_dir / "config.toml").read_text())
    torch.save(sync_loop(config, model_dir(config)), out)
