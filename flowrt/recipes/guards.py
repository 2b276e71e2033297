"""The guards of a run: the default rules, those of its configuration, and the checks of the latter.

The rules of a run are the defaults followed by `[[guard]]` in order; ``action = "off"`` removes all earlier rules on
its metric. The defaults only warn.
"""

from collections.abc import Collection, Iterator
from dataclasses import fields, replace
from difflib import get_close_matches
from itertools import chain

from flowrt.controller.policies.guards import GuardRule
from flowrt.errors import MAX_NAMES, ConfigError
from flowrt.recipes.algorithms import is_own
from flowrt.recipes.config import GuardConfig, RunConfig
from flowrt.recipes.metric_names import CLOCK, metric_names
from flowrt.rewards.scoring import reward_columns

TIMEOUTS = "reward_failures/timeout"
DEFAULT_RULES = (
    GuardRule("zero_variance_fraction", above=0.5, steps=10),
    GuardRule("truncated", above=0.25, steps=10),
    GuardRule("nll", below=0.02, steps=10),
    GuardRule("mismatch_kl_k3", above=0.05, steps=3),
    GuardRule("effective_sample_fraction", below=0.5, steps=3),
    GuardRule("grad_norm", above=20.0, median_of=50),
    GuardRule(TIMEOUTS, above=0.05, steps=3),
)
MAX_GUARDS = 256
FORM = (
    "METRIC above|below VALUE [relative=median] [window=N] [steps=N] [action=warn|hold|stop] [hold_steps=N], "
    "or METRIC off"
)
TEXT = ("action", "relative")
"""Options of a guard whose values are text; the others are numbers."""


def guard_rules(config: RunConfig) -> tuple[GuardRule, ...]:
    """All rules of a run, in order."""
    rules = default_rules(config)
    for guard in config.guard:
        if guard.action == "off":
            rules = [rule for rule in rules if rule.metric != guard.metric]
        else:
            rules.append(
                GuardRule(
                    metric=guard.metric,
                    above=guard.above,
                    below=guard.below,
                    steps=guard.steps,
                    action=guard.action,
                    hold_steps=guard.hold_steps,
                    median_of=guard.window if guard.relative == "median" else 0,
                )
            )
    return tuple(rules)


def default_rules(config: RunConfig) -> list[GuardRule]:
    """The default rules that apply to a run.

    The rule on zero variance does not apply to groups of one sample, nor the rule on timeouts to runs without that
    metric.
    """
    return [
        rule
        for rule in DEFAULT_RULES
        if (config.group_size > 1 or rule.metric != "zero_variance_fraction")
        and (rule.metric != TIMEOUTS or TIMEOUTS in reward_columns(config.reward))
    ]


def guard_mistakes(config: RunConfig, own_metrics: Collection[str] | None = None) -> Iterator[str]:
    """Guards that are not well formed, or that cannot act in this run.

    Args:
        config: the configuration of the run.
        own_metrics: metrics of the user's algorithm class; None: not known yet, so that with such a class any name is
            accepted.
    """
    if len(config.guard) > MAX_GUARDS:
        yield f"there are {len(config.guard)} guards; use at most {MAX_GUARDS}"
        return
    named = [rule.metric for rule in default_rules(config)]
    for guard in config.guard:
        yield from _metric_mistakes(guard.metric, config, own_metrics)
        if guard.action == "off":
            if replace(guard, action="warn") != GuardConfig(guard.metric):
                yield f"guard on {guard.metric} is off and has a limit; leave one of them out"
            if guard.metric not in named:
                yield f"guard on {guard.metric} is off, and there is none before it; leave it out"
            named = [name for name in named if name != guard.metric]
        else:
            yield from _rule_mistakes(guard, config)
            named.append(guard.metric)


def _metric_mistakes(metric: str, config: RunConfig, own_metrics: Collection[str] | None) -> Iterator[str]:
    known = {*metric_names(config), *(own_metrics or ())}
    if metric in known or (is_own(config.algorithm.name) and own_metrics is None):
        return
    if metric in CLOCK:
        yield (
            f"guard on {metric}: it counts steps or reads the clock, and guards depend on what was trained alone; use "
            "another metric"
        )
        return
    near = get_close_matches(metric, sorted(known), 5, 0.5)
    names = ", ".join(near or sorted(known)[:MAX_NAMES])
    yield (
        f"guard on {metric!r}: this run has no such metric; {'near it are' if near else 'there are'} {names} (all: "
        "docs/reference/metrics.md)"
    )


def _rule_mistakes(guard: GuardConfig, config: RunConfig) -> Iterator[str]:
    if (guard.above is None) == (guard.below is None):
        both = "neither above nor below" if guard.above is None else "both above and below"
        yield f"guard on {guard.metric} has {both}; give exactly one"
    limit = guard.below if guard.above is None else guard.above
    if guard.relative == "none":
        if guard.window != GuardConfig.window:
            yield (
                f"guard on {guard.metric} has window {guard.window}, which changes nothing without relative median; "
                "add it, or leave the window out"
            )
    elif limit is not None and not limit > 0:
        yield f"guard on {guard.metric} is relative to a median, and its limit is {limit:g} of it; use one above 0"
    needed = guard.steps + (guard.window if guard.relative == "median" else 0)
    if needed > config.steps:
        yield (
            f"guard on {guard.metric} needs {needed} steps (steps, and the window of a median), and the run has "
            f"{config.steps}: it would never fire; use fewer"
        )
    if guard.action == "hold":
        if config.max_staleness == 0:
            yield f"guard on {guard.metric} has action hold, and max_staleness is 0 already; use warn or stop"
    elif guard.hold_steps != GuardConfig.hold_steps:
        yield (
            f"guard on {guard.metric} has hold_steps {guard.hold_steps}, which changes nothing with action "
            f"{guard.action}; use action hold, or leave it out"
        )
    if guard.action == "stop" and not (config.checkpoint.every and config.checkpoint.preemption_save_timeout_s):
        yield (
            f"guard on {guard.metric} has action stop, which saves a checkpoint, and checkpoint.every or "
            "checkpoint.preemption_save_timeout_s is 0; set both, or use action warn"
        )


def parse_guard(text: str) -> dict[str, str | int | float]:
    """The table `[[guard]]` of a value of the flag ``--guard``. Raises ConfigError if the value is malformed."""
    words = text.split()
    if len(words) == 2 and words[1] == "off":
        return {"metric": words[0], "action": "off"}
    if len(words) < 3 or words[1] not in ("above", "below"):
        raise ConfigError(f"--guard {text!r:.80} is no rule; use {FORM}")
    table: dict[str, str | int | float] = {"metric": words[0]}
    options = {field.name for field in fields(GuardConfig)} - {"metric", "above", "below"}
    pairs = chain([(words[1], "=", words[2])], (word.partition("=") for word in words[3:]))
    for key, equals, value in pairs:
        if not equals or (key not in options and key != words[1]) or key in table:
            raise ConfigError(f"--guard {text!r:.80} has {key!r:.40} where it should not; use {FORM}")
        if key in TEXT:
            table[key] = value
            continue
        try:
            table[key] = float(value) if key == words[1] else int(value)
        except ValueError:
            raise ConfigError(f"--guard {text!r:.80}: {value!r:.40} is no number; use {FORM}") from None
    return table
