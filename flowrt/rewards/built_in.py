"""Built-in reward functions that are computed from the response and the answer; they run in a child process."""

import logging
import re
from collections import deque
from collections.abc import Callable, Mapping
from importlib.util import find_spec

from flowrt.errors import ConfigError
from flowrt.rewards.outcomes import RewardOutcome
from flowrt.rewards.reward_names import RewardFunction
from flowrt.rewards.user_file import as_text, outcome_of
from flowrt.runtime.user_module import Unusable

Scorer = Callable[[str, object, Mapping[str, object]], RewardOutcome]
"""Takes the response, the reference answer and the columns of the row."""


def check_packages(function: RewardFunction) -> None:
    """Raise ConfigError if a built-in function needs a package that is not installed."""
    if function.kind == "math" and find_spec("math_verify") is None:
        raise ConfigError("reward function math needs the package math-verify: pip install 'flowrt[math]'")


def built_in(function: RewardFunction) -> Scorer:
    """A scorer for this built-in function."""
    match function.kind:
        case "exact":
            return exact
        case "regex":
            return _regex(function.argument)
        case "format":
            return _format(function.argument)
        case "length":
            return _length(int(function.argument))
        case "math":
            return _math()
    raise AssertionError(function.kind)


def exact(response: str, answer: object, columns: Mapping[str, object]) -> RewardOutcome:  # noqa: ARG001
    """Score 1 if the response is the answer, apart from white space around them; else 0."""
    return outcome_of(float(response.strip() == as_text(answer).strip()), 0)


def _regex(pattern: str) -> Scorer:
    """1 if the last match of the pattern (its first group, if it has one) is the answer; else 0."""
    compiled = re.compile(pattern)

    def score(response: str, answer: object, columns: Mapping[str, object]) -> RewardOutcome:  # noqa: ARG001
        matches = deque(compiled.finditer(response), maxlen=1)
        extracted = matches[0][min(compiled.groups, 1)] if matches else None
        return outcome_of(float(extracted is not None and extracted.strip() == as_text(answer).strip()), 0)

    return score


def _format(pattern: str) -> Scorer:
    """1 if the pattern matches the whole response, apart from white space around it; else 0. Dots match newlines."""
    compiled = re.compile(pattern, re.DOTALL)

    def score(response: str, answer: object, columns: Mapping[str, object]) -> RewardOutcome:  # noqa: ARG001
        return outcome_of(float(compiled.fullmatch(response.strip()) is not None), 0)

    return score


def _length(limit: int) -> Scorer:
    """0 up to ``limit`` characters, then falling linearly to -1 at twice as many.

    The soft overlong punishment of DAPO (arXiv 2503.14476, equation 13) in characters instead of tokens, with L_cache =
    ``limit`` and L_max = 2 * ``limit``.
    """

    def score(response: str, answer: object, columns: Mapping[str, object]) -> RewardOutcome:  # noqa: ARG001
        return outcome_of(-min(max(len(response) / limit - 1.0, 0.0), 1.0), 0)

    return score


def _math() -> Scorer:
    """1 if the response contains an expression equal to the answer, by math-verify; else 0.

    The timeouts of math-verify use signals and are off: the pool keeps the deadline of the call.
    """
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # math-verify warns if its timeouts are off

    def score(response: str, answer: object, columns: Mapping[str, object]) -> RewardOutcome:  # noqa: ARG001
        text = as_text(answer)
        gold = parse(text if "$" in text or "\\boxed" in text else f"${text}$", parsing_timeout=None)
        if not gold:
            raise Unusable(f"math-verify finds no expression in the answer {text!r:.80}")
        return outcome_of(float(verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None)), 0)

    return score
