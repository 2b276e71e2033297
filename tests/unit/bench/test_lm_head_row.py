"""The measurement of the fused LM head, at a small size."""

import pytest
import torch
from objectives_rows.lm_head import QUICK, measure, narrow_errors, whole
from torch import Tensor


@pytest.mark.slow
def test_the_fused_head_needs_less_memory_than_the_logits() -> None:
    predictions, vocabulary, _ = QUICK
    metrics = measure(quick=True)
    assert 0 < metrics["lm_head_gb"] < 1.5 * predictions * vocabulary * 4 / 1e9  # whole logits and their gradient: 2
    assert metrics["lm_head_speed_ratio"] > 0


def test_bfloat16_is_as_near_to_float64_as_its_inputs_allow() -> None:
    torch.set_num_threads(1)
    value, gradient = narrow_errors(64, 3_000)
    assert value < 1e-5
    assert gradient < torch.finfo(torch.bfloat16).eps / 2, "more than one rounding of each number"
    assert gradient < 1.05 * narrow_errors(64, 3_000, whole)[1], (
        "processors round sums differently: compared on the same one"
    )


def test_log_probabilities_in_bfloat16_are_too_inaccurate() -> None:
    """The measurement detects the error that the fused head avoids."""

    def narrow(hidden_UD: Tensor, weight_VD: Tensor, prediction_T: Tensor, target_T: Tensor) -> Tensor:
        return (hidden_UD @ weight_VD.T).log_softmax(-1)[prediction_T, target_T]

    assert narrow_errors(64, 3_000, narrow)[0] > 1e-3
