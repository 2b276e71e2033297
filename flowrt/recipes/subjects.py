"""From a configuration to its subject: the one place where a recipe's name is looked at after parsing."""

from pathlib import Path

from flowrt.errors import ConfigError
from flowrt.recipes.arithmetic import Arithmetic
from flowrt.recipes.config import RunConfig
from flowrt.recipes.gsm8k import WordProblems
from flowrt.recipes.own import OwnProblems
from flowrt.recipes.problems import Subject


def subject(config: RunConfig) -> Subject:
    """The problems and the reward of a run. Raises ConfigError when its data is missing or malformed."""
    if config.recipe == "arithmetic":
        if config.data.path:
            raise ConfigError(
                f"recipe arithmetic makes its own problems and would not read {config.data.path}; "
                "for problems from a file: flowrt run gsm8k --data FILE"
            )
        return Arithmetic(config.seed, config.data.eval_prompts)
    if not config.data.path:
        raise ConfigError(
            f"recipe {config.recipe} reads its problems from a file; give one with --data.path FILE.jsonl"
        )
    data, path = config.data, Path(config.data.path)
    if config.recipe == "own":
        if not config.model or not data.reward:
            raise ConfigError("recipe own needs --model DIRECTORY and --data.reward FILE.py:FUNCTION, too")
        return OwnProblems(path, data.reward, data.prompt_field, data.answer_field, data.eval_prompts)
    return WordProblems(path, data.prompt_field, data.answer_field, data.eval_prompts, config.build.vocab_size)
