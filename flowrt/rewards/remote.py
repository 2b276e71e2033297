"""Reward functions that are requests: ``http:URL`` and ``judge``."""

from collections.abc import Sequence
from pathlib import Path

from flowrt.rewards.functions import RewardFunction
from flowrt.rewards.options import RewardOptions
from flowrt.rewards.outcomes import RewardOutcome


class RemoteRewards:
    """Makes requests for rewards."""

    def __init__(self, functions: Sequence[RewardFunction], options: RewardOptions, cache: Path | None) -> None:
        raise NotImplementedError

    async def call(self, function: RewardFunction, response: str, row: bytes) -> RewardOutcome:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


def check_remote(options: RewardOptions) -> None:
    """Raises ConfigError for options of requests that are wrong."""


def check_key(options: RewardOptions) -> None:
    """Raises ConfigError if the API key is named and not set."""
