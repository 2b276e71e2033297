"""Real processes with an injected cause of waiting: the attribution names it and measures the injected delay."""

import pytest
from seeing_parts.attribution import BOUNDS, Cast, of_plant

pytestmark = [pytest.mark.slow, pytest.mark.long]


def test_attribution_names_a_slow_trainer_and_measures_its_delay() -> None:
    with Cast() as cast:
        figures = of_plant(cast, "trainer")
    assert figures["causes_missed"] == 0
    assert figures["attribution_gap"] <= BOUNDS["attribution_gap"]
    assert figures["attribution_sum_error"] <= BOUNDS["attribution_sum_error"]
