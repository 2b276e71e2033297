"""Statistics of an evaluation: mean reward and pass@k over prompts, with standard errors.

Shapes: P prompts, n answers of each.
"""

import math
from collections.abc import Sequence


def pass_at_k(answers: int, solved: int, k: int) -> float:
    """Unbiased estimate of the probability that one of k answers solves a prompt: 1 - C(n - c, k) / C(n, k).

    Chen et al., arXiv 2107.03374, equation 1.

    Args:
        answers: n, the number of answers.
        solved: c, the number of answers that solve the prompt.
        k: from 1 to n.

    Raises:
        ValueError: if k is not from 1 to n, or c not from 0 to n.
    """
    if not (1 <= k <= answers and 0 <= solved <= answers):
        raise ValueError(f"pass@{k} of {answers} answers, of which {solved} solve the prompt")
    if answers - solved < k:
        return 1.0
    # A product of ratios: the binomial coefficients themselves overflow.
    return 1.0 - math.prod(1.0 - k / count for count in range(answers - solved + 1, answers + 1))


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean of P values (at least one), and its standard error, which is 0 for a single value."""
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return mean, 0.0
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count)


def statistics(rewards_Pn: Sequence[Sequence[float]], solved_reward: float, ks: Sequence[int]) -> dict[str, float]:
    """The metrics of an evaluation by name: avg@n and pass@k, each with its standard error (NAME_error).

    Args:
        rewards_Pn: n rewards for each of P prompts, P and n at least 1.
        solved_reward: reward from which an answer counts as right.
        ks: values of k, from 1 to n.

    Raises:
        ValueError: if a k is not from 1 to n.
    """
    answers = len(rewards_Pn[0])
    metrics: dict[str, float] = {}
    of_prompts = {f"avg@{answers}": [math.fsum(rewards) / answers for rewards in rewards_Pn]}
    for k in ks:
        solved = [sum(reward >= solved_reward for reward in rewards) for rewards in rewards_Pn]
        of_prompts[f"pass@{k}"] = [pass_at_k(answers, count, k) for count in solved]
    for name, values in of_prompts.items():
        metrics[name], metrics[f"{name}_error"] = mean_and_error(values)
    return metrics
