"""Verification of the RL objectives: one table of figures with their bounds.

    python bench/objectives.py [--parts PART ...] [--json PATH] [--quick] [--seeds N]
        [--trl-python PYTHON] [--against DIR|COMMIT]

Parts; without names, all of them. Proofs are modules of `tests/proofs/`, which the tests check too; the others are
modules of `bench/objectives_rows/`. docs/objectives.md explains them:

- closed_form: every part of an objective against scalar formulas, value and gradient;
- papers: every preset from rewards to gradients against the formula of its paper, every metric against its definition;
- enumeration: expected gradients, summed over all responses, against the true gradient or their own closed bias;
- invariance: the gradient of a whole model, however a step is cut into passes, packed, or spread over ranks;
- trl: values and gradients against TRL's own loss, in an environment that has TRL (``--trl-python``);
- bandit: fixed points of training with a divergence, through the rollout and the training engine;
- lm_head: memory and time of the fused LM head and of whole logits;
- token_budget: the variation of tokens a step and the response lengths, with a token budget;
- staleness: accuracy after training on samples that are 0 to 16 versions old;
- retention: accuracy gained when one generation gives the samples of 64 updates;
- dynamic, curriculum: steps and tokens that are saved by choosing prompts;
- default_speed: samples/s of the default job over those of another tree (``--against``);
- runs: the default job with each preset (hours without ``--quick``).
"""

import argparse
import sys
from pathlib import Path

import torch
from common.harness import Bench, Figures, Options, Part, Skipped, quick_part
from objectives_rows import default_speed, lm_head, retention, runs, sampling, staleness, token_budget

from tests.proofs import bandit, comparisons, enumeration, invariance, papers, trl

BOUNDS = {
    "closed_form_max": 1e-12,
    "paper_max": 1e-12,
    "metrics_wrong": 0.0,
    "enumeration_max": 1e-9,
    "enumeration_exact_max": 1e-12,
    "enumeration_biased_max": 1e-9,
    "invariance_max": 1e-11,
    "trl_gradient_max": 1e-6,
    "trl_loss_max": 1e-6,
    "bandit_tv_max": 0.005,
    "presets_failed": 0.0,
    "dynamic_steps_ratio": 0.8,
    "dynamic_equal_groups_trained": 0.0,
    "curriculum_ratio": 0.75,
    "retention_ppo_64": 0.8,
    "c3po_length_bias": 1.03,
    "lm_head_gb": 0.3,
    "lm_head_value_error": 1e-5,
    "lm_head_gradient_error": 2e-3,
}
"""Largest values of figures."""
LOWER_BOUNDS = {
    "staleness16_best": 0.95,
    "retention_dpo_64": 0.95,
    "c3po_cv_ratio": 10.0,
    "c3po_length_bias": 0.97,
    "default_speed_ratio": 0.98,
    "bound4_over_bound0_min": 0.98,
}
"""Smallest values of figures."""


def trl_losses(options: Options) -> Figures:
    """Values and gradients against TRL's own loss."""
    if not options.trl_python:
        raise Skipped("it needs --trl-python, a Python that has TRL")
    return trl.measure(options.quick, python=Path(options.trl_python))


def speed(options: Options) -> Figures:
    """Samples/s of the default job over those of another tree."""
    if not options.against:
        raise Skipped("it needs --against, a commit, or a checkout that has a .venv, to compare with")
    return default_speed.measure(options.quick, options.against)


def preset_runs(options: Options) -> Figures:
    """The default job with each preset."""
    return runs.measure(options.quick, options.seeds)


PARTS: dict[str, Part] = {
    "closed_form": quick_part(comparisons.measure),
    "papers": quick_part(papers.measure),
    "enumeration": quick_part(enumeration.measure),
    "invariance": quick_part(invariance.measure),
    "trl": trl_losses,
    "bandit": quick_part(bandit.measure),
    "lm_head": quick_part(lm_head.measure),
    "token_budget": quick_part(token_budget.measure),
    "staleness": quick_part(staleness.measure),
    "retention": quick_part(retention.measure),
    "dynamic": quick_part(sampling.dynamic),
    "curriculum": quick_part(sampling.curriculum),
    "default_speed": speed,
    "runs": preset_runs,
}


def seeds(text: str) -> int:
    """A number of seeds. Raises ValueError below 1."""
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def python(text: str) -> str:
    """An interpreter. Raises ArgumentTypeError if there is none."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no {text}")
    return text


def tree(text: str) -> str:
    """A tree to compare with. Raises ArgumentTypeError if that is impossible."""
    if reason := default_speed.refusal(text):
        raise argparse.ArgumentTypeError(reason)
    return text


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trl-python", type=python, help="a Python that has TRL; default: no part trl")
    against = "a commit, or a checkout with a .venv; default: no part default_speed"
    parser.add_argument("--against", type=tree, help=against)
    parser.add_argument("--seeds", type=seeds, default=runs.SEEDS, help="of the part runs (default: %(default)s)")


BENCH = Bench(
    about=__doc__,
    parts=PARTS,
    most=BOUNDS,
    least=LOWER_BOUNDS,
    add_options=add_options,
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(BENCH.main())
