"""Number of Hypothesis examples by profile: all in ``make test-long``, a share in ``make test`` and ``make fast``."""

from hypothesis import settings

THOROUGH_EXAMPLES = 60
TEST_EXAMPLES = 10
FAST_EXAMPLES = 8
"""Default ``max_examples`` of the three profiles; their ratios scale every other number of examples."""


def examples(full: int) -> int:
    """``max_examples`` under the loaded profile for a test that draws ``full`` of them in ``make test-long``."""
    default = settings.default
    assert default is not None
    return max(full * default.max_examples // THOROUGH_EXAMPLES, 2)
