"""Word problems from a file: solutions end in ``#### number``, and that number is what counts.

Reward: 1 when the response ends in ``#### `` and the right number, 0.1 when it ends in some well-formed number, else 0.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from flowrt.errors import ConfigError
from flowrt.recipes.config import BuildConfig, RolloutConfig, RunConfig, TrainerConfig, WarmStartConfig
from flowrt.recipes.datafile import read_rows
from flowrt.recipes.problems import Problem

FINAL = re.compile(r"#### (-?[\d,]*\.?\d+)\s*$")
WELL_FORMED_REWARD = 0.1


def config() -> RunConfig:
    """The complete default configuration: a small model that first learns to finish its answers."""
    base = RunConfig(
        recipe="gsm8k",
        steps=80,
        prompts_per_step=16,
        group_size=8,
        build=BuildConfig(hidden_size=192, layers=3, heads=4, intermediate_size=512, vocab_size=1024, max_length=512),
        warm_start=WarmStartConfig(steps=150, batch=16, lr=2e-3, probes=64, until=0.02, bare_steps=0),
        rollout=RolloutConfig(rows=64, max_new_tokens=128),
        trainer=TrainerConfig(lr=2e-4, beta2=0.98, warmup_steps=3, micro_batch_tokens=6144),
    )
    return replace(base, data=replace(base.data, eval_prompts=64))


class WordProblems:
    """The subject; the last ``eval_problems`` rows of the file are held out."""

    scores_unfinished = False

    def __init__(self, path: Path, prompt_field: str, answer_field: str, eval_problems: int, vocab_size: int) -> None:
        rows = read_rows(path, (prompt_field, answer_field))
        if len(rows) <= eval_problems:
            raise ConfigError(f"data file {path} has {len(rows)} rows, no more than data.eval_prompts={eval_problems}")
        problems = [
            _problem(question, solution, f"{path}, row {row}") for row, (question, solution) in enumerate(rows, 1)
        ]
        split = len(problems) - eval_problems
        self._training, self._held_out = problems[:split], problems[split:]
        self._vocab_size = vocab_size

    def training_problems(self) -> Sequence[Problem]:
        return self._training

    def held_out_problems(self) -> Sequence[Problem]:
        return self._held_out

    def lesson(self, rng: random.Random, bare: bool) -> Problem:
        problem = rng.choice(self._training)
        return replace(problem, solution=f"#### {problem.answer}") if bare else problem

    def reward(self, response: str, answer: str) -> float:
        found = FINAL.search(response)
        if found is None:
            return 0.0
        return 1.0 if _number(found[1]) == _number(answer) else WELL_FORMED_REWARD

    def tokenizer(self) -> Tokenizer:
        """A byte-level BPE trained on the training rows, so every text has a tokenization."""
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self._vocab_size,
            special_tokens=["<pad>", "<eos>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator((p.prompt + p.solution for p in self._training), trainer)
        return tokenizer


def _problem(question: str, solution: str, where: str) -> Problem:
    found = FINAL.search(solution)
    if found is None:
        raise ConfigError(f"data file {where}: the solution does not end in '#### number', so no answer can be checked")
    return Problem(question + "\n", found[1], solution)


def _number(text: str) -> float:
    return float(text.replace(",", ""))
