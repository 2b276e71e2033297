"""A key that cannot act in a configuration is refused, whatever its table, and accepted where it acts."""

import dataclasses
from collections.abc import Iterator
from operator import attrgetter
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from flowrt.errors import ConfigError, refuse
from flowrt.recipes.acting import Key, acting_mistakes, keys
from flowrt.recipes.algorithm_config import Loss
from flowrt.recipes.config import RunConfig, changed
from flowrt.recipes.config_io import defaults, parse
from flowrt.recipes.flag_help import meanings
from flowrt.recipes.tables import variants
from flowrt.runtime.conditions import OnlyIf

CONDITIONAL = [key for key in keys() if key.conditions]


def type_of(name: str) -> Any:
    """The type of a key, by its dotted name."""
    table, _, field = name.rpartition(".")
    return get_type_hints(type(attrgetter(table)(RunConfig()) if table else RunConfig()))[field]


def another(kind: Any, but: tuple[Any, ...]) -> Any:
    """A value of this type that is none of ``but``."""
    if get_origin(kind) is Literal:
        return next(arg for arg in get_args(kind) if arg not in but)
    if get_origin(kind) is UnionType:
        return another(get_args(kind)[0], but)
    values: dict[Any, tuple[Any, ...]] = {
        bool: (True, False),
        int: (1, 2, 3, 4),
        float: (0.25, 0.5, 0.75),
        str: ("x", "y", "z"),
    }
    choices = [("http://127.0.0.1:1",), ("http://127.0.0.1:2",)] if get_origin(kind) is tuple else values[kind]
    return next(choice for choice in choices if choice not in but)


FUNCTIONS = {"file": "mine.py", "http": "http:http://127.0.0.1:1", "model": "model:DIR"}
"""Texts of reward functions by kind; others are their kind alone."""


def functions(kind: object) -> tuple[str, ...]:
    """Reward functions of one kind."""
    return (FUNCTIONS.get(str(kind), str(kind)),)


def fulfilled(conditions: tuple[OnlyIf, ...]) -> dict[str, Any]:
    """Values of other keys with which all conditions hold."""
    changed: dict[str, Any] = {
        condition.key: condition.have[0] if condition.have else another(type_of(condition.key), condition.but)
        for condition in conditions
    }
    if "reward.functions" in changed:
        changed["reward.functions"] = functions(changed["reward.functions"])
    return changed | ({"recipe": "gsm8k"} if "recipe" in changed else {})


def broken(condition: OnlyIf) -> dict[str, Any]:
    """Values of other keys with which a condition does not hold."""
    if condition.key == "reward.functions":
        return {condition.key: functions("exact" if "judge" in condition.have else "judge")}
    if condition.have:
        return {name: another(type_of(name), condition.have) for name in condition.keys}
    return dict.fromkeys(condition.keys, condition.but[0])


@pytest.mark.parametrize("key", CONDITIONAL, ids=[key.name for key in CONDITIONAL])
def test_a_key_acts_or_is_refused(key: Key) -> None:
    """Under each of its conditions: accepted where all hold, refused by name where one does not."""
    base = defaults("gsm8k")
    unusual = (
        key.default,
        attrgetter(key.name)(base),
        *(value for condition in key.conditions for value in condition.off),
    )
    value = another(type_of(key.name), unusual)
    acts = changed(base, fulfilled(key.conditions) | {key.name: value})
    refuse(acting_mistakes(acts))
    for condition in key.conditions:
        idle = changed(acts, broken(condition))
        with pytest.raises(ConfigError) as refused:
            refuse(acting_mistakes(idle))
        sentence = str(refused.value)
        assert any(name in sentence for name in (key.name, *broken(condition))), sentence
        assert "changes nothing with" in sentence


def test_conditions_name_keys_and_values_that_exist() -> None:
    names = {key.name for key in keys()}
    for key in CONDITIONAL:
        for condition in key.conditions:
            assert set(condition.keys) <= names, key.name
            kinds = [type_of(name) for name in condition.keys if name != "algorithm.loss.type"]
            choices = {choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)}
            texts = {value for value in (*condition.have, *condition.but) if isinstance(value, str)}
            assert not choices or texts <= choices, key.name
            assert condition.key != "algorithm.loss.type" or {*condition.have, *condition.but} <= set(variants(Loss))


def texts(table: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """The dotted name and the help text of each key."""
    below = meanings(type(table))
    for attribute in dataclasses.fields(table):
        value = getattr(table, attribute.name)
        if dataclasses.is_dataclass(value):
            yield from texts(value, f"{prefix}{attribute.name}.")
        else:
            yield f"{prefix}{attribute.name}", below.get(attribute.name, "")


def test_keys_of_one_engine_have_a_condition() -> None:
    """Whose help begins with "Engine NAME:"."""
    conditional = {key.name for key in CONDITIONAL}
    names = {name for name, text in texts(RunConfig()) if text.startswith("Engine ")}
    starts = {name for name in names if name.rpartition(".")[2] != "engine"}
    assert len(starts) > 2
    assert starts <= conditional


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--trainer.fsdp.gather pass",
            "trainer.fsdp.gather is 'pass', which changes nothing with trainer.engine torch",
        ),
        ("--trainer.fsdp.recompute True", "set trainer.engine to fsdp, or leave it out"),
        (
            "--trainer.engine fsdp --trainer.lora.alpha 8",
            "trainer.lora.alpha is 8.0, which changes nothing with trainer.lora.rank 0",
        ),
        ("--trainer.min-lr 1e-5", "with trainer.schedule constant; set trainer.schedule, or leave it out"),
        ("--rollout.sglang.weights tensor", "with rollout.engine torch; set rollout.engine to sglang"),
        ("--rollout.recompute-kv-on-update False", "with rollout.weight_update between_sequences"),
        ("--checkpoint.every 0 --checkpoint.keep 5", "set checkpoint.every or checkpoint.hf_every"),
        ("--samples.per-step 0 --samples.mb 9", "samples.mb is 9, which changes nothing with samples.per_step 0"),
        ("--trainer.balance-ranks-by-tokens True", "with trainer.ranks 1; set trainer.ranks, or leave it out"),
        ("--trainer.save False --trainer.final-dir x", "trainer.final_dir is 'x', which changes nothing"),
        ("--sft.answer-only-steps 0 --sft.answer-only-lr 0.1", "sft.answer_only_lr is 0.1"),
        ("--model-overrides {}", "set model, or leave it out"),
        ("--eval.at-start False --eval.at-end False --eval.samples 4", "eval.samples is 4, which changes nothing with"),
        ("--max-staleness 0 --algorithm.staleness-weight polynomial", "changes nothing with max_staleness 0"),
        ("--data.answer-key a", "data.answer_key is 'a', which changes nothing with recipe arithmetic"),
        (
            "custom --reward exact --reward.code-sandbox limits",
            "reward.code_sandbox is 'limits', which changes nothing with reward.functions ('exact',); name a function "
            "of kind code, or leave it out",
        ),
        (
            "custom --reward http:http://h --reward.workers 2",
            "reward.workers is 2, which changes nothing with reward.functions",
        ),
        ("custom --reward exact --reward.judge.url http://h", "reward.judge.url is 'http://h', which changes nothing"),
        (
            "custom --reward exact --reward.without-after whole",
            "with reward.after ''; set reward.after, or leave it out",
        ),
        ("--build.vocab-size 300", "build.vocab_size is 300, which changes nothing with recipe arithmetic"),
    ],
)
def test_a_key_that_cannot_act_is_refused_with_the_way_out(flags: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(flags.split())
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "flags",
    [
        "--trainer.engine fsdp --trainer.fsdp.gather pass",
        "--trainer.schedule cosine --trainer.min-lr 1e-5",
        "--checkpoint.every 0 --checkpoint.hf-every 5 --checkpoint.keep 5",
        "--checkpoint.every 0 --checkpoint.preemption-save-timeout-s 0",
        "--rollout.weight-update in_flight --rollout.recompute-kv-on-update False",
        "--trainer.micro-batch-samples 8 --trainer.micro-batch-tokens 1024",
        "custom --reward mine.py --reward.workers 2 --reward.after x --reward.without-after whole",
        "custom --reward exact --reward judge --reward.judge.url http://h --reward.judge.model m --reward.memory-mb 99",
        "--eval.at-start False --eval.at-end False --eval.interval 10 --eval.samples 4",
        "--eval.at-start False --eval.at-end False --data.eval-prompts 0 --checkpoint.every 0 --algorithm.kl.coef 0",
    ],
)
def test_keys_that_act_and_defaults_of_the_recipe_are_accepted(flags: str) -> None:
    parse(flags.split())


def test_keys_of_the_embedded_model_are_refused_with_another_one() -> None:
    config = changed(defaults("arithmetic"), {"model": "DIR"})
    refuse(acting_mistakes(config))
    refuse(acting_mistakes(changed(config, {"sft.steps": 0, "sft.answer_only_steps": 0})))
    with pytest.raises(
        ConfigError, match=r"build\.layers is 7, which changes nothing with model DIR; leave one of them"
    ):
        refuse(acting_mistakes(changed(config, {"build.layers": 7})))
