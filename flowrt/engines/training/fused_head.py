"""The fused LM head inside a model: log-probabilities from the last hidden states, where all logits would be large.

The model's own forward pass runs, up to and including the call of its LM head, so that hooks, sharding and adapters of
the model work as in any other pass. The head itself returns log-probabilities and entropies in place of logits.

With supports it computes the logits of their tokens alone. A model that changes the logits after its head is compared
at the start with the changes that its configuration may mean (`LogitChange`); if it does none of them, it computes all
logits.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from flowrt.algorithms.lm_head import UNCHANGED, LogitChange, fused_logprobs, fused_support_logprobs
from flowrt.algorithms.support import Support
from flowrt.engines.descriptor import WHOLE_LOGITS

TRIAL_TOKENS = 4
TRIAL_LOGITS = (-40.0, -6.0, -1.3, -0.2, 0.3, 2.0, 9.0, 50.0)
"""Two for each token of the trial: what the head returns in it."""
SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
"""Settings of transformers' models that multiply or divide the logits."""
CAP = "final_logit_softcapping"
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
        support: of all tokens, over which log-probabilities are renormalised; None: over the whole vocabulary.
        entropy: whether entropies are computed; with a support they are 0 otherwise.
    """

    rows_U: Tensor | None
    prediction_T: Tensor
    target_T: Tensor
    temperature: float
    support: Support | None = None
    entropy: bool = True


class FusedHead(torch.nn.Linear):
    """An LM head that returns logits, or, while ``asked`` is set, log-probabilities and entropies [1, T, 2] in nats."""

    change: LogitChange = UNCHANGED
    asked: ResponseTokens | None = None
    trial: Tensor | None = None
    given: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:  # torch.nn.Linear calls this argument ``input``
        if self.asked is None:
            return super().forward(hidden)
        if self.given is not None:
            raise RuntimeError("the LM head was called twice in a pass")
        hidden_UD = hidden.flatten(0, -2)
        if self.asked.rows_U is not None:
            hidden_UD = hidden_UD.index_select(0, self.asked.rows_U)
        predictions = self._predictions(hidden_UD, self.asked)
        self.given = predictions if self.trial is None else self.trial.to(hidden)
        return self.given

    def _predictions(self, hidden_UD: Tensor, asked: ResponseTokens) -> Tensor:
        """Log-probabilities and entropies [1, T, 2] of the tokens."""
        tokens = self.weight, asked.prediction_T, asked.target_T
        rest: dict[str, Any] = {"bias_V": self.bias, "change": self.change}
        entropy_T = None
        if asked.support is None or asked.entropy:
            logprobs_T, entropy_U = fused_logprobs(hidden_UD, *tokens, asked.temperature, **rest)
            entropy_T = entropy_U[asked.prediction_T]
        if asked.support is not None:
            logprobs_T = fused_support_logprobs(hidden_UD, *tokens, asked.support, asked.temperature, **rest)
        if entropy_T is None:
            entropy_T = torch.zeros_like(logprobs_T)
        return torch.stack([logprobs_T.unsqueeze(0), entropy_T.unsqueeze(0)], -1)  # no view, for the hooks of FSDP2


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
    given, returned = _call(model, asked, inputs)
    if returned is not given:  # the hooks of FSDP2 need a gradient of what the model returns
        given = given + 0 * returned
    logprobs_T, entropy_T = given[0].unbind(-1)
    return logprobs_T, entropy_T


@torch.no_grad()
def enable_fused_head(model: Any) -> bool:
    """Enable the fused head for this model, if the model supports it. Returns whether it does.

    The model's head must be a plain linear layer without hooks, whose output the model returns unchanged, or scaled and
    capped as its configuration says. Collective for a sharded model.
    """
    head = _head(model)
    if isinstance(head, FusedHead):
        return True
    if type(head) is not torch.nn.Linear or head._forward_hooks or head._forward_pre_hooks or head._backward_hooks:
        return False
    head.__class__ = FusedHead
    change = _change_of(model)
    if change is None:
        head.__class__ = torch.nn.Linear
        return False
    _head(model).change = change
    return True


def _change_of(model: Any) -> LogitChange | None:
    """What the model does with the output of its head, from a trial with a few tokens; None if it is not known."""
    head = _head(model)
    tokens_1L = torch.zeros(1, TRIAL_TOKENS, dtype=torch.int64, device=next(model.parameters()).device)
    asked = ResponseTokens(None, torch.arange(TRIAL_TOKENS, device=tokens_1L.device), tokens_1L[0], 1.0)
    head.trial = torch.tensor(TRIAL_LOGITS, dtype=head.weight.dtype).view(1, TRIAL_TOKENS, 2)
    try:
        given, returned = _call(model, asked, {"input_ids": tokens_1L, "use_cache": False})
    except TRIAL_ERRORS:
        return None
    finally:
        head.trial = None
    if returned is given:
        return UNCHANGED
    if head.out_features != model.config.get_text_config().vocab_size:
        return None  # it may leave out some of them
    return next((change for change in _changes(model) if torch.equal(change.apply(given), returned.to(given))), None)


def _changes(model: Any) -> Iterator[LogitChange]:
    """The changes of logits that the settings of the model may mean."""
    config = model.config.get_text_config()
    scales = {float(value) for name in SCALES if (value := getattr(config, name, None))} - {1.0}
    caps = [float(getattr(config, CAP, None) or 0.0), 0.0]
    for scale, cap in product([1.0, *scales], caps):
        yield LogitChange(factor=scale, cap=cap)
        yield LogitChange(divisor=scale, cap=cap)


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
