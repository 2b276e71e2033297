"""The embedded model of a run, built before its workers start: tokenizer, random weights, warm start, checkpoint."""

import argparse
import copy
import logging
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from flowrt.engines.base import Prompt, Response, sample_seed
from flowrt.engines.hf import save_model
from flowrt.engines.tiny_model import (
    ANSWER_ONLY_EVALUATION_INTERVAL,
    EVALUATION_INTERVAL,
    SftExample,
    SftStage,
    build_model,
    sft,
)
from flowrt.engines.tiny_model import wrap_tokenizer as wrap
from flowrt.engines.training.lora import add_adapters
from flowrt.errors import EXIT_BAD_INPUT, FlowError
from flowrt.launcher.prompt_check import check_prompts
from flowrt.recipes.config import RunConfig
from flowrt.recipes.config_io import from_file
from flowrt.recipes.eval_sets import run_prompts
from flowrt.recipes.prompt_limits import PromptLimits, longest_key
from flowrt.recipes.run_dir import model_dir
from flowrt.recipes.tasks.base import Example, Task
from flowrt.recipes.tasks.registry import task_of
from flowrt.recipes.tasks.task_file import called, is_task_file, split
from flowrt.runtime.files import RunLock
from flowrt.runtime.standard_streams import log_to_stderr

log = logging.getLogger("flowrt")
Result = TypeVar("Result")


def build(config: RunConfig) -> None:
    """Write the checkpoint that the run starts from to its run directory. Raises ConfigError for unusable prompts."""
    RunLock(Path(config.run_dir))  # held until this process ends
    torch.set_num_threads(config.threads)
    start_s = time.monotonic()
    task = task_of(config)
    tokenizer = wrap(task.tokenizer())
    shape = config.build
    check_prompts(
        run_prompts(config, task),
        tokenizer,
        limits=PromptLimits(
            positions=shape.max_length,
            vocab_size=len(tokenizer),
            max_new_tokens=config.longest_response,
            max_new_tokens_key=longest_key(config),
            max_prompt_tokens=config.data.max_prompt_tokens,
            overlong=config.data.overlong,
        ),
        what="the embedded model (build.max_length)",
        form=config.data.prompt_format,
    )
    model = build_model(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        layers=shape.layers,
        heads=shape.heads,
        intermediate_size=shape.intermediate_size,
        max_length=shape.max_length,
        seed=config.seed,
    )
    if config.trainer.lora.rank:
        add_adapters(copy.deepcopy(model), config.trainer.lora)  # refuses its targets before the warm start
    data = WarmStartData(config, task, tokenizer)
    warm = config.sft
    evaluations = sft(
        model,
        data.stages(),
        data.mean_reward,
        data.prompts(),
        batch=warm.batch,
        max_new_tokens=config.rollout.max_new_tokens,
        seed=config.seed,
    )
    for step, reward in evaluations:
        log.info("warm start, step %d: mean reward %.3f", step, reward)
    save_model(model, tokenizer, model_dir(config))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    log.info("%d parameters ready after %.1f s", parameters, time.monotonic() - start_s)


class WarmStartData:
    """Training examples and evaluation prompts of the warm start, as tokens."""

    def __init__(self, config: RunConfig, task: Task, tokenizer: Any) -> None:
        self._config = config
        self._task = task
        self._tokenizer = tokenizer
        rng = random.Random(f"probes {config.seed}")
        examples = list(task.training_problems())
        self._examples = rng.sample(examples, min(config.sft.eval_prompts, len(examples)))

    def stages(self) -> list[SftStage]:
        """The stages of training: on worked solutions, then on answers alone."""
        warm = self._config.sft
        with_solution = SftStage(
            warm.steps,
            first_evaluation=max(warm.steps // 3, 1),
            interval=EVALUATION_INTERVAL,
            lr=warm.lr,
            example=lambda rng: self._example(rng, answer_only=False),
            is_done=lambda reward: reward >= warm.stop_reward,
        )
        answer_only = SftStage(
            warm.answer_only_steps,
            first_evaluation=ANSWER_ONLY_EVALUATION_INTERVAL,
            interval=ANSWER_ONLY_EVALUATION_INTERVAL,
            lr=warm.answer_only_lr,
            example=lambda rng: self._example(rng, answer_only=True),
            is_done=lambda reward: reward <= warm.answer_only_stop_reward,
        )
        return [with_solution, answer_only]

    def prompts(self) -> list[Prompt]:
        """The prompts of the evaluations."""
        return [
            Prompt(index, self._ids(example.prompt), sample_seed(self._config.seed, index, 0, 0, 0))
            for index, example in enumerate(self._examples)
        ]

    def mean_reward(self, responses: list[Response]) -> float:
        """The mean reward of responses to `prompts`; the text of a truncated response counts as empty."""
        total = 0.0
        for response in responses:
            ids = response.tokens.tolist()
            text = "" if response.truncated else self._tokenizer.decode(ids, skip_special_tokens=True)
            total += self._reward(text, self._examples[response.key].answer)
        return total / len(responses)

    def _reward(self, response: str, answer: str) -> float:
        return self._called("in reward", lambda: self._task.reward(response, answer))

    def _example(self, rng: random.Random, answer_only: bool) -> SftExample:
        return self._encode(self._called("in sft_example", lambda: self._task.sft_example(rng, answer_only)))

    def _called(self, doing: str, call: Callable[[], Result]) -> Result:
        """The result of a call of the task. Raises ConfigError for an exception in a user's task file."""
        recipe = self._config.recipe
        return called(split(recipe)[0], doing, call) if is_task_file(recipe) else call()

    def _encode(self, example: Example) -> SftExample:
        end = torch.tensor([self._tokenizer.eos_token_id], dtype=torch.int32)
        limit = self._config.rollout.max_new_tokens
        response = torch.cat([self._ids(example.solution), end])
        return SftExample(self._ids(example.prompt), response[:limit])

    def _ids(self, text: str) -> torch.Tensor:
        return torch.tensor(self._tokenizer(text)["input_ids"], dtype=torch.int32)


def main() -> int:
    parser = argparse.ArgumentParser(description="build the embedded model of a run")
    parser.add_argument("--config", required=True, help="the run's config.toml")
    arguments = parser.parse_args()
    log_to_stderr()
    try:
        build(from_file(Path(arguments.config)))
    except FlowError as error:
        log.error("%s", error)
        return EXIT_BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main())
