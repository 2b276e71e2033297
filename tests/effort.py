"""How much each command runs: all in ``make test-long``, a share of examples and cases in ``make test``."""

import itertools
from collections.abc import Iterable
from enum import Enum
from typing import Any

import pytest
from hypothesis import settings

THOROUGH_EXAMPLES = 60
TEST_EXAMPLES = 7
FAST_EXAMPLES = 6
"""Default ``max_examples`` of Hypothesis in the three profiles; their ratios scale every other number of examples."""


def examples(full: int) -> int:
    """``max_examples`` under the loaded profile for a test that draws ``full`` of them in ``make test-long``."""
    default = settings.default
    assert default is not None
    return max(full * default.max_examples // THOROUGH_EXAMPLES, 2)


SHARE = 3


def combinations(*values: Iterable[Any]) -> list[Any]:
    """All combinations of parameters. ``make test`` runs a third of them, ``make test-long`` the others, too.

    Of three parameters each pair of values is in that third, if the other parameter has `SHARE` values or more.
    """
    numbered = [list(enumerate(some)) for some in values]
    return [
        pytest.param(
            *(value for _, value in chosen),
            id="-".join(value.name.lower() if isinstance(value, Enum) else str(value) for _, value in chosen),
            marks=[pytest.mark.long] if sum(at for at, _ in chosen) % SHARE else [],
        )
        for chosen in itertools.product(*numbered)
    ]
