"""The reward of `compare_trl.py`, for both sides: the share of a response's characters that the prompt asked for."""


def reward(response: str, answer: str) -> float:
    """``answer`` is all the characters that count."""
    return sum(character in answer for character in response) / max(len(response), 1)
