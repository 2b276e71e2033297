"""Time limits that follow the model, the length of responses and the size of a step: all of them are derived here.

A limit bounds work that cannot report its progress (`flowrt.runtime.progress`). Each assumes a machine that is far
slower than any that is used for the model, so that only work that hangs reaches it.
"""

import math

BASE_S = 600.0
"""Part of each limit that depends on nothing: compilation, a busy machine, the first access to a file system."""
MIN_BYTES_PER_S = 50e6
"""Lowest rate at which weights are read, converted, copied or written."""
STATE_COPIES = 6
"""Bytes of a checkpoint of full training (float32 weights and both moments) by bytes of the weights (bfloat16)."""
MIN_FLOP_PER_S = 2e10
"""Lowest rate of a forward or backward pass: of two slow processor cores."""
MIN_PASS_TOKENS_PER_S = 5.0
"""The same for models so large that this would be slower: they are not computed on such a machine."""
FLOP_PER_WEIGHT_BYTE = 4
"""Floating-point operations per token and byte of the weights, forward and backward: 8 per parameter in bfloat16."""
MIN_TOKENS_PER_S = 1.0
"""Lowest rate at which one sequence is generated, in tokens per second."""
MAX_TOKENS_PER_S = 500.0
"""Highest rate at which one sequence is generated."""
MIN_DRAIN_S = 30.0
MIN_REQUEST_S = 3600.0
CONTROLLER_START_S = 30.0
MIN_STORED_BYTES_PER_S = 5e6
"""Lowest rate at which a controller reads the ledger of a run that it continues, and finds samples in journals."""
MAX_REQUEST_S = 30 * 24 * 3600.0


def weights_s(weight_bytes: int) -> float:
    """Limit of work on all weights once, such as to load, stage or copy them; ``weight_bytes`` is their size."""
    return BASE_S + weight_bytes / MIN_BYTES_PER_S


def state_s(weight_bytes: int) -> float:
    """Limit of work on the whole state of a trainer: to update, save or load it."""
    return BASE_S + STATE_COPIES * weight_bytes / MIN_BYTES_PER_S


def controller_start_s(stored_bytes: int) -> float:
    """Limit of the start of a controller, until it listens; ``stored_bytes``: of its ledger and the run's journals."""
    return CONTROLLER_START_S + stored_bytes / MIN_STORED_BYTES_PER_S


def pass_s(tokens: int, weight_bytes: int) -> float:
    """Limit of passes over this number of tokens, forward and backward."""
    token_s = weight_bytes * FLOP_PER_WEIGHT_BYTE / MIN_FLOP_PER_S
    return BASE_S + tokens * min(token_s, 1.0 / MIN_PASS_TOKENS_PER_S)


def generation_s(samples: int, rows: int, max_new_tokens: int, tokens_per_s: float) -> float:
    """Time to generate samples of the maximum length, ``rows`` at a time, at a rate per sequence in tokens per s."""
    return math.ceil(samples / rows) * max_new_tokens / tokens_per_s


def generation_limit_s(base_s: float, max_new_tokens: int) -> float:
    """Limit of one sequence on a responsive server: ``base_s`` longer than at the lowest rate."""
    return base_s + max_new_tokens / MIN_TOKENS_PER_S


def drain_s(max_new_tokens: int) -> float:
    """Limit of a worker that leaves: its responses and those of the same prompts on other workers are completed first.

    Only then are the tensors that it holds needed by no other worker.
    """
    return MIN_DRAIN_S + max_new_tokens / MIN_TOKENS_PER_S


def request_s(samples: int, rows: int, max_new_tokens: int, step_s: float = 0.0) -> float:
    """Limit of one request to the controller: it may wait for all open samples, and for the end of a step.

    Args:
        samples: number of samples of the open steps and evaluations.
        rows: number of sequences that all rollout workers run at a time.
        max_new_tokens: maximum length of a response, in tokens.
        step_s: limit of training a step.
    """
    generating_s = generation_s(samples, rows, max_new_tokens, MIN_TOKENS_PER_S)
    return min(max(MIN_REQUEST_S, generating_s + step_s), MAX_REQUEST_S)


def least_request_s(samples: int, rows: int, max_new_tokens: int) -> float:
    """The shortest useful limit of one request; arguments as of `request_s`. A shorter one ends runs that work."""
    return generation_s(samples, rows, max_new_tokens, MAX_TOKENS_PER_S)
