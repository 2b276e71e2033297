"""GRPO as a plain synchronous loop in one process: what a run at staleness 0 must equal, bit for bit.

Generate a whole batch, reward it, score it under the reference, train on it, repeat. No controller, no lanes, no
versions, no pulls: only the engine's forward pass and the algorithms are flowrt's.
"""

import random
import sys
import threading
from pathlib import Path

import torch

from flowrt.algorithms import GrpoLoss, group_advantages
from flowrt.engines.checkpoint import load_model, load_tokenizer
from flowrt.engines.folded_attention import use_folded
from flowrt.engines.protocols import Prompt, TrainingBatch
from flowrt.engines.scoring import score
from flowrt.engines.seeds import sample_seed
from flowrt.engines.torch_rollout import TorchRollout
from flowrt.engines.torch_train import TorchTrainer
from flowrt.recipes.config import RunConfig
from flowrt.recipes.load import from_toml
from flowrt.recipes.paths import model_dir
from flowrt.recipes.subjects import subject


def generate(policy, tokenizer, config: RunConfig, prompt: torch.Tensor, index: int, member: int):
    engine = TorchRollout(
        policy,
        eos_id=tokenizer.eos_token_id,
        rows=1,
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
    )
    engine.add([Prompt(0, prompt, sample_seed(config.seed, index, 0, member, 0))])
    responses = []
    while not responses:
        responses = engine.run(threading.Event())
    return responses[0]


def micro_batches(groups: list[dict], budget: int) -> list[list[dict]]:
    """Groups in order, cut as soon as a micro-batch holds ``budget`` tokens."""
    cuts, tokens = [[]], 0
    for group in groups:
        if tokens >= budget:
            cuts.append([])
            tokens = 0
        cuts[-1].append(group)
        tokens += sum(len(group["prompt"]) + len(response) for response in group["responses"])
    return cuts


def sync_loop(config: RunConfig, model: Path) -> dict[str, torch.Tensor]:
    """Train and return the final weights by name."""
    torch.set_num_threads(1)
    problems, tokenizer = subject(config).training_problems(), load_tokenizer(model)
    policy, reference = load_model(model), load_model(model).eval()
    assert use_folded(reference)
    loss = GrpoLoss(config.loss.clip_low, config.loss.clip_high, config.loss.kl_coef)
    trainer = TorchTrainer(
        policy, config.trainer, loss, correction_cap=config.loss.correction_cap, temperature=config.rollout.temperature
    )
    order = list(range(len(problems)))
    random.Random(f"order {config.seed} 0").shuffle(order)
    for step in range(config.steps):
        groups = []
        for index in order[step * config.prompts_per_step : (step + 1) * config.prompts_per_step]:
            prompt = torch.tensor(tokenizer(problems[index].prompt)["input_ids"], dtype=torch.int32)
            made = [generate(policy, tokenizer, config, prompt, index, m) for m in range(config.group_size)]
            rewards = []
            for response in made:
                ids = response.tokens.tolist()
                text = tokenizer.decode(ids, skip_special_tokens=True) if ids[-1] == tokenizer.eos_token_id else ""
                rewards.append(subject(config).reward(text, problems[index].answer))
            tokens = [response.tokens for response in made]
            scored = score(reference, [prompt] * len(made), tokens, config.rollout.temperature, 1)
            logprobs = [response.logprobs for response in made]
            groups.append(
                {"prompt": prompt, "responses": tokens, "logprobs": logprobs, "scored": scored, "rewards": rewards}
            )
        policy.train()
        for cut in micro_batches(groups, config.trainer.micro_batch_tokens):
            rewards_N = torch.tensor([reward for group in cut for reward in group["rewards"]])
            groups_N = torch.tensor([number for number, group in enumerate(cut) for _ in group["rewards"]])
            trainer.accumulate(
                TrainingBatch(
                    prompts=[group["prompt"] for group in cut for _ in group["responses"]],
                    responses=[tokens for group in cut for tokens in group["responses"]],
                    rollout_logprobs=[one for group in cut for one in group["logprobs"]],
                    reference_logprobs=[one for group in cut for one in group["scored"]],
                    advantages_N=group_advantages(rewards_N, groups_N),
                    weights_N=torch.ones(len(rewards_N)),
                )
            )
        trainer.step()
    return {name: tensor.clone() for name, tensor in trainer.parameters().items()}


if __name__ == "__main__":
    # In a process of its own: the thread settings of whoever calls must not reach the arithmetic.
    run_dir, out = Path(sys.argv[1]), Path(sys.argv[2])
    config = from_toml((run_dir / "config.toml").read_text())
    torch.save(sync_loop(config, model_dir(config)), out)
