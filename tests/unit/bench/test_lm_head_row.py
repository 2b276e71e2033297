"""The measurement of the fused LM head, at a small size."""

from objectives_rows.lm_head import QUICK, measure


def test_the_fused_head_needs_less_than_the_logits() -> None:
    predictions, words, _ = QUICK
    metrics = measure(quick=True)
    assert metrics.keys() == {"lm_head_gb", "lm_head_speed_ratio"}
    assert 0 < metrics["lm_head_gb"] < 1.5 * predictions * words * 4 / 1e9  # whole logits and their gradient: 2
    assert metrics["lm_head_speed_ratio"] > 0
