"""Your own problems and reward: prompts from a file, a Python function for the reward, any model.

The function takes the response and the prompt's answer as text and returns a number, the more the better::

    def reward(response: str, answer: str) -> float: ...
"""

import importlib.util
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from flowrt.errors import ConfigError
from flowrt.recipes.config import RolloutConfig, RunConfig, TrainerConfig
from flowrt.recipes.datafile import read_rows
from flowrt.recipes.problems import Problem

FUNCTION = "reward"
Reward = Callable[[str, str], float]


def config() -> RunConfig:
    """The default configuration: what a model of some size bears; the data, the reward and the model have none."""
    base = RunConfig(
        recipe="own",
        rollout=RolloutConfig(max_new_tokens=256),
        trainer=TrainerConfig(lr=1e-5, warmup_steps=10, micro_batch_tokens=8192),
    )
    return replace(base, data=replace(base.data, prompt_field="prompt", eval_prompts=64))


class OwnProblems:
    """The subject; the last ``eval_problems`` rows of the file are held out."""

    scores_unfinished = True

    def __init__(self, path: Path, reward: str, prompt_field: str, answer_field: str, eval_problems: int) -> None:
        rows = read_rows(path, (prompt_field, answer_field))
        if len(rows) <= eval_problems:
            raise ConfigError(f"data file {path} has {len(rows)} rows, no more than data.eval_prompts={eval_problems}")
        problems = [Problem(prompt, answer, "") for prompt, answer in rows]
        split = len(problems) - eval_problems
        self._training, self._held_out = problems[:split], problems[split:]
        self._name, self._reward = reward, load_reward(reward)

    def training_problems(self) -> Sequence[Problem]:
        return self._training

    def held_out_problems(self) -> Sequence[Problem]:
        return self._held_out

    def reward(self, response: str, answer: str) -> float:
        with _yours(f"the reward function {self._name} failed on {response[:80]!r}"):
            value = float(self._reward(response, answer))
        if not math.isfinite(value):
            raise ConfigError(f"the reward function {self._name} gave {value} for {response[:80]!r}; it must be finite")
        return value

    def lesson(self, rng: random.Random, bare: bool) -> Problem:  # noqa: ARG002
        raise _no_model()

    def tokenizer(self) -> Tokenizer:
        raise _no_model()


def load_reward(name: str) -> Reward:
    """``FILE.py`` (its function `reward`) or ``FILE.py:FUNCTION``. Raises ConfigError when it cannot be loaded."""
    file, _, function = name.partition(":")
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"data.reward is {name!r}, and there is no file {file!r}; give FILE.py:FUNCTION")
    spec = importlib.util.spec_from_file_location("flowrt_own_reward", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"data.reward is {name!r}, and {file} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    with _yours(f"data.reward: {path} cannot be imported"):
        spec.loader.exec_module(module)
    found = getattr(module, function or FUNCTION, None)
    if not callable(found):
        raise ConfigError(f"data.reward: {path} has no function {function or FUNCTION!r}; name it as FILE.py:FUNCTION")
    reward: Reward = found
    return reward


@contextmanager
def _yours(what: str) -> Iterator[None]:
    """Code of the user's: whatever it raises is told in one sentence."""
    try:
        yield
    except Exception as error:
        raise ConfigError(f"{what} ({type(error).__name__}: {error}); correct it, and start or resume again") from error


def _no_model() -> ConfigError:
    return ConfigError("recipe own starts from a model of yours; name its directory with --model")
