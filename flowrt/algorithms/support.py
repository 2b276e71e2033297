"""Log-probabilities over the support of a truncated sampling distribution (top-k, top-p, min-p).

Such a sampler draws from the softmax p restricted to a few tokens, its support, and renormalised:
m(a) = p(a) / p(support). A ratio of two policies is right only if both have the same support. So the rollout engine
records the support of each token, and the trainer computes its log-probabilities over it (DeepSeek-V3.2, arXiv
2512.02556, "Keep Sampling Mask").

Shapes: T = response tokens, flattened, E = entries of all their supports, U = predictions, V = vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SUMMED = 256
"""Entries of a support that are summed one after the other."""


@dataclass(frozen=True, slots=True, eq=False)
class Support:
    """The tokens that could be drawn at each position of a response.

    Attributes:
        tokens_E: int token ids, position after position; distinct within a position.
        counts_T: int, number of tokens of each position, which sum to E.
    """

    tokens_E: Tensor
    counts_T: Tensor

    @property
    def position_E(self) -> Tensor:
        """int64, the position of each entry."""
        return torch.arange(len(self.counts_T), device=self.counts_T.device).repeat_interleave(self.counts_T)

    def to(self, device: torch.device) -> "Support":
        """This support on ``device``."""
        return Support(self.tokens_E.to(device), self.counts_T.to(device))

    def prefix(self, positions: int | None) -> "Support":
        """The support of the first ``positions`` positions; None: of all."""
        counts_T = self.counts_T[:positions]
        return Support(self.tokens_E[: int(counts_T.sum())], counts_T)

    def suffix(self, positions: int) -> "Support":
        """The support of the positions after the first ``positions``."""
        return Support(self.tokens_E[int(self.counts_T[:positions].sum()) :], self.counts_T[positions:])

    def fits(self, response_T: Tensor) -> bool:
        """Whether there is one support for each token of a response, which contains the token exactly once."""
        if len(self.counts_T) != len(response_T) or bool((self.counts_T < 1).any()):
            return False
        if int(self.counts_T.sum()) != len(self.tokens_E):
            return False
        position_E = self.position_E
        drawn_E = self.tokens_E == response_T[position_E]
        return torch.equal(position_E[drawn_E], torch.arange(len(response_T), device=position_E.device))


def singletons(response_T: Tensor) -> Support:
    """A support with only the response's own token at each position, so all log-probabilities are 0."""
    return Support(response_T, torch.ones_like(response_T))


def join_supports(supports: Sequence[Support]) -> Support:
    """One support of the positions of all responses, in order."""
    return Support(
        torch.cat([support.tokens_E for support in supports]), torch.cat([support.counts_T for support in supports])
    )


def last_supports(supports: Sequence[Support], positions: int) -> Support:
    """One support of the last ``positions`` positions of all responses, 1 or more."""
    parts: list[Support] = []
    for support in reversed(supports):
        if positions <= 0:
            break
        count = len(support.counts_T)
        parts.append(support if count <= positions else support.suffix(count - positions))
        positions -= count
    return join_supports(parts[::-1])


def support_logprobs(
    logits_UV: Tensor, prediction_T: Tensor, target_T: Tensor, support: Support, temperature: float
) -> Tensor:
    """Log-probabilities of tokens, renormalised over their supports: log p(target) - log p(support).

    Args:
        logits_UV: logits of the predictions.
        prediction_T: index of the prediction of each token; several tokens may share one.
        target_T: the tokens.
        support: of all tokens, on the device of the logits.
        temperature: divides the logits.

    Returns:
        logprobs_T in nats, float32 or wider, with gradient; 0 for the only token of a support.

    Raises:
        ValueError: if the temperature is not positive, or a token is not in its support.
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0 (greedy rollouts have no log-probability)")
    selected_E = logits_UV[prediction_T[support.position_E], support.tokens_E.long()]
    scaled_E = selected_E.to(torch.promote_types(logits_UV.dtype, torch.float32)) / temperature
    return normalise_over_support(scaled_E, target_T, support)


def normalise_over_support(scaled_E: Tensor, target_T: Tensor, support: Support) -> Tensor:
    """As `support_logprobs`, from the logits of the supports' entries over temperature, in float32 or wider."""
    position_E = support.position_E
    drawn_T = (support.tokens_E == target_T[position_E]).nonzero().squeeze(1)
    if not torch.equal(position_E[drawn_T], torch.arange(len(target_T), device=position_E.device)):
        raise ValueError(f"a token of {len(target_T)} is not in its support; every sampled token must be")
    # Softmax is invariant to a common offset, but logit - logsumexp loses precision if logits are large.
    peak_T = scaled_E.new_full((len(target_T),), -torch.inf)
    peak_T = peak_T.scatter_reduce(0, position_E, scaled_E.detach(), "amax")
    centred_E = scaled_E - peak_T[position_E]
    return centred_E[drawn_T] - _sum_by_position(centred_E.exp(), support).log()


def _sum_by_position(values_E: Tensor, support: Support) -> Tensor:
    """The sum of the values of each position [T], first in blocks of SUMMED entries.

    A sum of 200,000 float32 numbers one after the other is off by up to 4e-4 of itself.
    """
    counts_T, position_E = support.counts_T.long(), support.position_E
    blocks_T = -(-counts_T // SUMMED)
    first_T, position_B = counts_T.cumsum(0) - counts_T, torch.arange(len(counts_T), device=counts_T.device)
    position_B = position_B.repeat_interleave(blocks_T)
    place_E = torch.arange(len(values_E), device=values_E.device) - first_T[position_E]
    block_E = (blocks_T.cumsum(0) - blocks_T)[position_E] + place_E // SUMMED
    sums_B = values_E.new_zeros(len(position_B)).index_add(0, block_E, values_E)
    return values_E.new_zeros(len(counts_T)).index_add(0, position_B, sums_B)
