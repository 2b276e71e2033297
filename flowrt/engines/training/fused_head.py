"""The fused LM head inside a model: log-probabilities from the last hidden states, where all logits would be large.

The model's own forward pass runs, up to and including the call of its LM head, so that hooks, sharding and adapters of
the model work as in any other pass. The head itself returns log-probabilities and entropies in place of logits.

A model that changes the logits after its head (soft-capping, scaling) is detected by a trial at the start, and computes
all logits.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrt.algorithms.lm_head import fused_logprobs
from flowrt.engines.descriptor import WHOLE_LOGITS

TRIAL_TOKENS = 4
TRIAL_ERRORS = (TypeError, ValueError, LookupError, RuntimeError, AttributeError, AssertionError)
"""Exceptions of a model whose operations on its logits fail on the output of the fused head."""


@dataclass(frozen=True, slots=True)
class ResponseTokens:
    """The T response tokens whose predictions the head computes in a pass. Indices are int64.

    Attributes:
        rows_U: positions whose next-token prediction is used, among those for which the head is called; None: all.
        prediction_T: index into the U predictions of each token's prediction.
        target_T: the token ids.
        temperature: divides the logits.
    """

    rows_U: Tensor | None
    prediction_T: Tensor
    target_T: Tensor
    temperature: float


class FusedHead(torch.nn.Linear):
    """An LM head that returns logits, or, while ``asked`` is set, log-probabilities and entropies [1, T, 2] in nats."""

    asked: ResponseTokens | None = None
    given: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:  # torch.nn.Linear calls this argument ``input``
        if self.asked is None:
            return super().forward(hidden)
        if self.given is not None:
            raise RuntimeError("the LM head was called twice in a pass")
        hidden_UD = hidden.flatten(0, -2)
        if self.asked.rows_U is not None:
            hidden_UD = hidden_UD.index_select(0, self.asked.rows_U)
        logprobs_T, entropy_U = fused_logprobs(
            hidden_UD,
            self.weight,
            self.asked.prediction_T,
            self.asked.target_T,
            self.asked.temperature,
            bias_V=self.bias,
        )
        predictions = logprobs_T.unsqueeze(0), entropy_U[self.asked.prediction_T].unsqueeze(0)
        self.given = torch.stack(predictions, -1)  # not a view, for the hooks of FSDP2
        return self.given


def is_head_fused(model: Any) -> bool:
    """Whether `fused_pass` works with this model: `enable_fused_head` has succeeded."""
    return isinstance(_head(model), FusedHead)


def uses_fused_head(model: Any, predictions: int) -> bool:
    """Whether a pass with this number of ``predictions`` uses the fused head, because its logits would be large."""
    head = _head(model)
    return isinstance(head, FusedHead) and predictions * head.out_features > WHOLE_LOGITS


def fused_pass(model: Any, asked: ResponseTokens, **inputs: Any) -> tuple[Tensor, Tensor]:
    """Run the model on ``inputs``. Returns logprobs_T and entropy_T (nats) of the tokens' predictions.

    Raises RuntimeError if the model does not call its head exactly once.
    """
    given, _ = _call(model, asked, inputs)
    logprobs_T, entropy_T = given[0].unbind(-1)
    return logprobs_T, entropy_T


@torch.no_grad()
def enable_fused_head(model: Any) -> bool:
    """Enable the fused head for this model, if the model supports it. Returns whether it does.

    The model's head must be a plain linear layer without hooks, whose output the model returns unchanged. Collective
    for a sharded model.
    """
    head = _head(model)
    if isinstance(head, FusedHead):
        return True
    if type(head) is not torch.nn.Linear or head._forward_hooks or head._forward_pre_hooks or head._backward_hooks:
        return False
    head.__class__ = FusedHead
    if _is_returned(model):
        return True
    head.__class__ = torch.nn.Linear
    return False


def _is_returned(model: Any) -> bool:
    """Whether the model returns the output of its head unchanged, from a trial with a few tokens."""
    device = next(model.parameters()).device
    tokens_1L = torch.zeros(1, TRIAL_TOKENS, dtype=torch.int64, device=device)
    asked = ResponseTokens(None, torch.arange(TRIAL_TOKENS, device=device), tokens_1L[0], 1.0)
    try:
        given, returned = _call(model, asked, {"input_ids": tokens_1L, "use_cache": False})
    except TRIAL_ERRORS:
        return False
    return returned is given


def _call(model: Any, asked: ResponseTokens, inputs: dict[str, Any]) -> tuple[Tensor, Any]:
    """The output of the head, and the logits that the model returned."""
    head = _head(model)
    head.asked = asked
    try:
        returned = model(**inputs).logits
        if head.given is None:
            raise RuntimeError("the model does not call its LM head")
        return head.given, returned
    finally:
        head.asked = head.given = None


def _head(model: Any) -> Any:
    find = getattr(model, "get_output_embeddings", None)
    return find() if callable(find) else None
