"""Number of Hypothesis examples by profile: all of them in ``make test``, a share in ``make fast``."""

from hypothesis import settings

FULL_EXAMPLES = 60
FAST_EXAMPLES = 8
"""Default ``max_examples`` of the two profiles; their ratio scales every other number of examples."""


def examples(full: int) -> int:
    """``max_examples`` under the loaded profile for a test that draws ``full`` of them in ``make test``."""
    default = settings.default
    assert default is not None
    return max(full * default.max_examples // FULL_EXAMPLES, 2)
