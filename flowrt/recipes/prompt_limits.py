"""Limits on the length of prompts."""

import sys
from dataclasses import dataclass
from typing import Any, Literal

from flowrt.engines.model_config import parse_overrides, position_limit, with_overrides
from flowrt.recipes.config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLimits:
    """Limits on the tokens of a prompt.

    Attributes:
        positions: context length of the model, for prompt and response together, in tokens; None: unlimited.
        vocab_size: number of token ids of the model.
        max_new_tokens: maximum length of a response, in tokens.
        max_new_tokens_key: the key that sets it.
        max_prompt_tokens: maximum length of a prompt, in tokens; 0: what the positions leave.
        overlong: whether a longer prompt is an error, or its row is dropped.
    """

    positions: int | None
    vocab_size: int
    max_new_tokens: int
    max_new_tokens_key: str = "rollout.max_new_tokens"
    max_prompt_tokens: int = 0
    overlong: Literal["error", "drop"] = "error"

    @property
    def most(self) -> int:
        """Maximum number of tokens of a prompt."""
        left = max(self.positions - self.max_new_tokens, 0) if self.positions is not None else sys.maxsize
        return min(left, self.max_prompt_tokens or sys.maxsize)

    def refusal(self, tokens: int, what: str) -> str:
        """Why a prompt is too long: the part of an error message after the place of the prompt.

        Args:
            tokens: length of the prompt, more than `most`.
            what: the model in the message.
        """
        if self.max_prompt_tokens and tokens > self.max_prompt_tokens == self.most:
            return f"the prompt has {tokens} tokens, more than data.max_prompt_tokens ({self.max_prompt_tokens})"
        return (
            f"the prompt has {tokens} tokens, and with {self.max_new_tokens_key} {self.max_new_tokens} more than the "
            f"{self.positions} positions of {what}"
        )


def longest_key(config: RunConfig) -> str:
    """The key that sets `RunConfig.longest_response`."""
    is_own = config.eval.max_new_tokens > config.rollout.max_new_tokens
    return "eval.max_new_tokens" if is_own else "rollout.max_new_tokens"


def prompt_limits(config: RunConfig, model_config: Any) -> PromptLimits:
    """The limits on the prompts of a run.

    Args:
        config: the configuration of the run.
        model_config: transformers' configuration of the model (of its text part).
    """
    return PromptLimits(
        positions=position_limit(with_overrides(model_config.to_dict(), parse_overrides(config.model_overrides))),
        vocab_size=getattr(model_config, "vocab_size", None) or sys.maxsize,
        max_new_tokens=config.longest_response,
        max_new_tokens_key=longest_key(config),
        max_prompt_tokens=config.data.max_prompt_tokens,
        overlong=config.data.overlong,
    )
