"""Configurations: precedence, round trips, refused values, ranges, and documentation."""

import ast
import contextlib
import dataclasses
import functools
import inspect
import io
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch

from flowrt.cli import main
from flowrt.engines.base import sample_seed
from flowrt.engines.registry import ROLLOUT_ENGINES
from flowrt.errors import ConfigError
from flowrt.observability.run_reader import flat
from flowrt.recipes.algorithm_config import AlgorithmConfig
from flowrt.recipes.algorithms import PRESETS
from flowrt.recipes.config import GuardConfig, RunConfig
from flowrt.recipes.config_io import RECIPE_NAMES, defaults, from_toml, parse, to_toml
from flowrt.recipes.constraints import check
from flowrt.recipes.data_config import DataSetConfig
from flowrt.recipes.flag_help import meaning_of_type
from flowrt.recipes.tables import bare, leaves, merge, owner, variants
from flowrt.recipes.tasks.registry import task_of
from flowrt.runtime.bounds import contains, ends, interval_of, span

PYTHON = ["--rollout.sglang.python", sys.executable]
URL = ["--rollout.sglang.url"]


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


# ---- precedence


def test_no_arguments_give_the_default_recipe() -> None:
    assert parse([]) == defaults("arithmetic")


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_a_recipe_name_gives_its_defaults(recipe: str) -> None:
    assert parse([recipe]) == defaults(recipe)
    assert defaults(recipe).recipe == recipe


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_the_recipe_flag_equals_the_positional_name(recipe: str) -> None:
    assert parse(["--recipe", recipe]) == defaults(recipe)


def test_an_unknown_recipe_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean 'arithmetic'"):
        parse(["--recipe", "arithmetik"])


def test_the_recipe_may_come_from_the_file(tmp_path: Path) -> None:
    file = write(tmp_path / "run.toml", '\ufeffrecipe = "gsm8k"\nsteps = 7')  # editors on Windows write that mark
    assert parse(["--config", file]) == dataclasses.replace(defaults("gsm8k"), steps=7)


@pytest.mark.parametrize("spelling", ["apart", "joined"])
def test_flags_override_the_file_which_overrides_the_defaults(tmp_path: Path, spelling: str) -> None:
    text = "steps = 7\nseed = 8\n[trainer]\nlr = 0.5\nbeta1 = 0.25\n[rollout]\nmax_running_requests = 3"
    file = write(tmp_path / "run.toml", text)
    config = ["--config", file] if spelling == "apart" else [f"--config={file}"]
    base = defaults("arithmetic")
    got = parse(["--steps", "9", *config, "--trainer.lr", "0.125"])
    assert (got.steps, got.trainer.lr) == (9, 0.125)
    assert (got.seed, got.trainer.beta1, got.rollout.max_running_requests) == (8, 0.25, 3)
    assert (
        dataclasses.replace(
            got,
            steps=base.steps,
            seed=base.seed,
            trainer=dataclasses.replace(got.trainer, lr=base.trainer.lr, beta1=base.trainer.beta1),
            rollout=dataclasses.replace(got.rollout, max_running_requests=base.rollout.max_running_requests),
        )
        == base
    )


def test_a_flag_equal_to_the_default_overrides_the_file(tmp_path: Path) -> None:
    base = defaults("arithmetic")
    file = write(tmp_path / "run.toml", f"steps = {base.steps + 1}")
    assert parse(["--config", file, "--steps", str(base.steps)]) == base


def test_data_is_short_for_data_path() -> None:
    assert parse(["gsm8k", "--data", "f.jsonl"]).data.path == "f.jsonl"
    assert parse(["gsm8k", "--data.path", "f.jsonl"]).data.path == "f.jsonl"


def test_an_integer_is_accepted_for_a_float(tmp_path: Path) -> None:
    lr = parse(["--config", write(tmp_path / "run.toml", "[trainer]\nlr = 1")]).trainer.lr
    assert (lr, type(lr)) == (1.0, float)


def test_merge_does_not_change_its_base() -> None:
    base = defaults("arithmetic")
    merged = merge(base, {"rollout": {"workers": 5}}, "test")
    assert merged.rollout.workers == 5
    assert base == defaults("arithmetic")


# ---- round trip


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_toml_round_trip_of_the_defaults(recipe: str) -> None:
    assert from_toml(to_toml(defaults(recipe))) == defaults(recipe)


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_toml_round_trip_with_every_value_changed(recipe: str) -> None:
    changed = dataclasses.replace(_change(defaults(recipe)), recipe=recipe)
    assert changed != defaults(recipe)
    assert from_toml(to_toml(changed)) == changed


def test_an_invalid_choice_is_refused_with_the_valid_ones(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"'rollout\.weight_update' takes one of between_sequences, in_flight, not 'never'"
    ):
        parse(["--config", write(tmp_path / "run.toml", '[rollout]\nweight_update = "never"')])


@pytest.mark.parametrize("table", [*map(defaults, RECIPE_NAMES), *PRESETS.values()])
def test_a_key_that_may_be_left_out_is_left_out_of_recipes_and_presets(table: Any) -> None:
    """TOML, which has no null, could not take its value away."""
    optional = [name for name, hint in leaves(type(table)) if type(None) in get_args(bare(hint))]
    assert len(optional) >= 2
    values = dict(flat(dataclasses.asdict(table)))
    assert not [name for name in optional if values.get(name) is not None and name != "loss.dual_clip"]


def test_toml_round_trip_of_special_characters() -> None:
    special = 'C:\\data\\"x"\n\té 😀 #[a]'
    config = dataclasses.replace(defaults("arithmetic"), run_dir=special)
    assert from_toml(to_toml(config)) == config


def _change(config: Any) -> Any:
    changes: dict[str, Any] = {}
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if get_origin(hints[field.name]) is Literal:
            changes[field.name] = next((other for other in get_args(hints[field.name]) if other != value), value)
        elif dataclasses.is_dataclass(value):
            kinds = [*variants(hints[field.name]).values()]
            changes[field.name] = _change(kinds[-1]() if kinds else value)
        elif value is None:  # a number that is not set
            changes[field.name] = 0.5
        elif isinstance(value, bool):
            changes[field.name] = not value
        elif isinstance(config, AlgorithmConfig) and field.name == "name":
            changes[field.name] = "dapo"
        elif isinstance(value, str):
            changes[field.name] = value + " other"
        elif field.name == "guard":
            changes[field.name] = (*value, GuardConfig("a", above=-0.5, steps=2), GuardConfig("b", below=1e-9))
        elif field.name == "sets":
            changes[field.name] = (*value, DataSetConfig("a", "a b/c", 0.25), DataSetConfig("b", "é:=", 1.0))
        elif isinstance(value, tuple):
            changes[field.name] = (*value, "\n\n", 'a "quoted" é')
        else:
            changes[field.name] = value + type(value)(1)
    return dataclasses.replace(config, **changes)


# ---- refused values


def test_a_group_of_one_is_allowed_without_standard_deviation() -> None:
    none = ["--algorithm.advantage.baseline", "none", "--algorithm.advantage.scale", "none"]
    config = parse(["--group-size", "1", *none])
    assert (config.group_size, config.algorithm.advantage.baseline) == (1, "none")


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"max_staleness": -1}, "max_staleness"),
        ({"group_size": 1}, "group_size"),
        ({"group_size": 0}, "group_size"),
        ({"steps": 0}, "steps"),
        ({"prompts_per_step": 0}, "prompts_per_step"),
        ({"threads": 0}, "threads"),
        ({"rollout": {"workers": 0}}, "rollout.workers"),
        ({"rollout": {"max_running_requests": 0}}, "rollout.max_running_requests"),
        ({"rollout": {"max_new_tokens": 0}}, "rollout.max_new_tokens"),
        ({"rollout": {"temperature": 0.0}}, "rollout.temperature"),
        ({"rollout": {"temperature": float("nan")}}, "rollout.temperature"),
        ({"trainer": {"ranks": 0}}, "trainer.ranks"),
        ({"trainer": {"micro_batch_tokens": 0}}, "trainer.micro_batch_tokens"),
        ({"trainer": {"forward_tokens": 0}}, "trainer.forward_tokens"),
        ({"trainer": {"lr": -1.0}}, "trainer.lr"),
        ({"trainer": {"lr": float("nan")}}, "trainer.lr"),
        ({"trainer": {"beta1": 1.5}}, "trainer.beta1"),
        ({"algorithm": {"correction": {"high": 0.5}}}, "algorithm.correction.high"),
        ({"algorithm": {"kl": {"coef": -1.0}}}, "algorithm.kl.coef"),
        ({"build": {"heads": 0}}, "build.heads"),
        ({"build": {"layers": 0}}, "build.layers"),
        ({"sft": {"batch": 0}}, "sft.batch"),
        ({"data": {"epochs": -1}}, "data.epochs"),
        ({"controller": {"heartbeat_s": 0.0}}, "controller.heartbeat_s"),
        ({"controller": {"worker_timeout_s": 0.5}}, "controller.worker_timeout_s"),
        ({"controller": {"lease_s": 0.0}}, "controller.lease_s"),
    ],
    ids=lambda value: value if isinstance(value, str) else json.dumps(value),
)
def test_impossible_values_are_refused_by_name(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        check(merge(defaults("arithmetic"), changes, "test"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], "name its Python"),
        ([*PYTHON, "--rollout.sglang.url", "http://host:1"], "not both"),
        (["--rollout.sglang.python", "/no/such/python"], "is not a file"),
        (["--rollout.sglang.url", "host:1"], "begins with http"),
        ([*PYTHON, "--rollout.sglang.device", "npu", "--rollout.sglang.weights", "broadcast"], "use disk or tensor"),
        ([*URL, "http://host:1", "--rollout.workers", "2"], "rollout.workers is 2, and .* has 1 address"),
        ([*URL, "http://host:1", "http://host:2", "--rollout.workers", "1"], "is 1, and .* has 2 address"),
        ([*URL, "http://host:1", "http://host:1/", "--rollout.workers", "2"], "names a server twice"),
        ([*URL, "http://host:port", "--rollout.workers", "1"], "wrong host or port"),
        ([*URL, "http://me:secret@host:1", "--rollout.workers", "1"], "user name or password.*SGLANG_API_KEY"),
        ([*PYTHON, "--rollout.sglang.arguments=--api-key secret"], "has --api-key: the run's files would have it"),
        ([*PYTHON, "--rollout.sglang.arguments=--admin-api-key=secret"], "has --admin-api-key: the run's files"),
        ([*PYTHON, "--rollout.sglang.arguments=--model-path other"], "has --model-path: use --model"),
        ([*PYTHON, "--rollout.sglang.arguments=--port 30000"], "has --port: .*rollout.sglang.url"),
        ([*PYTHON, "--rollout.sglang.arguments=--dp-size 2"], "has --dp-size 2: .*more rollout workers"),
        ([*PYTHON, "--rollout.sglang.arguments=--pp-size=2"], "has --pp-size 2: .*more rollout workers"),
        ([*PYTHON, "--rollout.sglang.arguments=--nnodes 2 --tp 8"], "has --nnodes 2: .*more rollout workers"),
        *(
            ([*PYTHON, f"--rollout.sglang.arguments=--tp {value}"], "has --tp '.*', which is no number of devices")
            for value in ("0", "-2", "x", "1.0", "")
        ),
        ([*PYTHON, "--rollout.stop", *map(str, range(33))], "has 33 strings, and SGLang accepts 32"),
        ([*PYTHON, '--rollout.sglang.arguments=--name "x'], "arguments"),
        ([*PYTHON, "--deterministic", "True"], "need --rollout.engine torch"),
        ([*PYTHON, "--rollout.recompute-kv-on-update", "False"], "set rollout.sglang.pause in its place"),
        ([*PYTHON, "--rollout.compile", "True"], "engine sglang; set rollout.sglang.arguments in its place"),
        ([*PYTHON, "--rollout.sglang.update-s", "0"], "above 0"),
        ([*PYTHON, "--trainer.engine", "fsdp", "--trainer.lora.rank", "4"], "use --trainer.lora.publish merged"),
    ],
)
def test_invalid_sglang_settings_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        parse(["--rollout.engine", "sglang", *settings])
    assert "secret" not in str(refused.value)


VLLM, VLLM_URL = ["--rollout.vllm.python", sys.executable], ["--rollout.workers", "1", "--rollout.vllm.url"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], "name its Python"),
        ([*VLLM, "--rollout.vllm.url", "unix:/s"], "not both"),
        (["--rollout.vllm.python", "/no/such/python"], "is not a file"),
        ([*VLLM_URL, "unix:relative"], "begins with http"),
        ([*VLLM_URL, "http://me:secret@host:1"], "user name or password.*VLLM_API_KEY"),
        (["--rollout.workers", "2", "--rollout.vllm.url", "unix:/s", "unix:/s"], "names a server twice"),
        ([*VLLM, "--rollout.vllm.arguments=--uds /s"], "has --uds: .*rollout.vllm.url"),
        ([*VLLM, "--rollout.vllm.arguments=--logprobs-mode raw_logprobs"], "has --logprobs-mode: .*leave it out"),
        ([*VLLM, "--rollout.vllm.arguments=-dp 2"], "has -dp 2: .*more rollout workers"),
        ([*VLLM, "--rollout.vllm.arguments=-tp x"], "has -tp 'x', which is no number of devices"),
        ([*VLLM, "--rollout.top-k", "513"], "rollout.top_k is 513, and .* 512 tokens .*; lower it"),
        ([*VLLM, "--rollout.compile", "True"], "engine vllm; set rollout.vllm.arguments in its place"),
        ([*VLLM, "--rollout.sglang.pause", "abort"], "rollout.sglang.pause is 'abort', which changes nothing"),
        ([*VLLM, "--deterministic", "True"], "need --rollout.engine torch"),
    ],
)
def test_invalid_vllm_settings_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        parse(["--rollout.engine", "vllm", *settings])
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "devices"), [("", 1), ("-tp 2", 2), ("--tensor-parallel-size=4", 4), ("--tensor-par 8", 8)]
)
def test_a_vllm_server_has_the_devices_of_its_arguments(arguments: str, devices: int) -> None:
    config = parse(["--rollout.engine", "vllm", *VLLM, f"--rollout.vllm.arguments={arguments}"])
    assert ROLLOUT_ENGINES["vllm"].devices(config.rollout) == devices


def test_all_mistakes_are_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers out of bounds, and what one field requires of another; the latter where all numbers are in bounds."""
    assert main(["run", "--steps", "0", "--trainer.lr", "-1", "--algorithm.kl.horizon", "5"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "flowrt: there are 2 mistakes:",
        "  steps is 0; use a value above 0, and at most 10,000,000",
        "  trainer.lr is -1.0; use 0 or more, and at most 10",
    ]
    flags = ["--guard", "nll off", "--guard", "nll off", "--build.heads", "5", "--algorithm.kl.horizon", "500"]
    assert main(["run", *flags, "--eval.split", "test", "--reward", "exact"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "flowrt: there are 5 mistakes:"
    for line, start in zip(
        lines[1:],
        (
            "guard on nll is off",
            "build.heads is 5",
            "eval.split is 'test'",
            "recipe arithmetic",
            "algorithm.kl.horizon",
        ),
        strict=True,
    ):
        assert line.startswith(f"  {start}")


def test_data_for_a_recipe_that_generates_its_problems_is_refused(tmp_path: Path) -> None:
    """Otherwise the run would silently train on other data."""
    data = write(tmp_path / "rows.jsonl", '{"question": "1+1?", "answer": "#### 2"}\n')
    with pytest.raises(ConfigError, match="gsm8k"):
        task_of(parse(["arithmetic", "--data", data]))


# ---- the range of every number


def numeric_fields() -> dict[str, Any]:
    """The annotated type of every numeric field of a configuration, by its dotted name."""
    return {name: hint for name, hint in leaves(RunConfig) if bare(hint) in (int, float)}


def nested(name: str, value: object) -> dict[str, Any]:
    """The tables in which the key of this dotted name has a value."""
    table: Any = value
    for key in reversed(name.split(".")):
        table = {key: table}
    return dict(table)


def base_with(name: str, recipe: str = "arithmetic") -> RunConfig:
    """The default configuration of a recipe, with the last type of a table that has the key of this dotted name."""
    path, _, key = name.rpartition(".")
    parent, _, table = f".{path}".rpartition(".")
    config = defaults(recipe)
    kinds = variants(get_type_hints(type(attrgetter(parent[1:])(config) if parent else config)).get(table))
    of_type = [kind for kind, fields in kinds.items() if owner(fields, key)]
    return merge(config, nested(f"{path}.type", of_type[-1]), "test") if of_type else config


def with_value(name: str, value: object) -> RunConfig:
    """The default configuration with another value of the field of this dotted name."""
    return merge(base_with(name), nested(name, value), "test")


def test_every_numeric_field_has_finite_bounds() -> None:
    assert len(numeric_fields()) > 70
    for name, hint in numeric_fields().items():
        interval = interval_of(hint)
        assert interval is not None, name
        low, high = ends(interval)
        assert math.isfinite(low)
        assert math.isfinite(high)
        assert low < high


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_every_default_is_in_its_range(recipe: str) -> None:
    for name, hint in numeric_fields().items():
        interval = interval_of(hint)
        assert interval is not None
        assert contains(interval, attrgetter(name)(base_with(name, recipe)))


@pytest.mark.parametrize(("name", "hint"), numeric_fields().items())
def test_a_number_outside_its_range_is_refused_by_name(name: str, hint: Any) -> None:
    interval = interval_of(hint)
    assert interval is not None
    low, high = ends(interval)
    outside: list[float] = [low - 1, high + 1, 10**30, -(10**30)]
    is_integer = get_args(hint)[0] is int
    values = [int(value) for value in outside] if is_integer else [*outside, math.inf, -math.inf, math.nan]
    for value in values:
        with pytest.raises(ConfigError, match=rf"^{re.escape(name)} is .*; use "):
            check(with_value(name, value))


def test_infinity_and_not_a_number_are_refused_in_flags_and_files(tmp_path: Path) -> None:
    for word in ("inf", "-inf", "nan", "1e999"):
        with pytest.raises(ConfigError, match=r"rollout\.temperature is (-?inf|nan); use 0.01 or more"):
            parse([f"--rollout.temperature={word}"])
    for word in ("inf", "-inf", "nan"):
        with pytest.raises(ConfigError, match=r"trainer\.lr is (-?inf|nan); use 0 or more, and at most"):
            parse(["--config", write(tmp_path / "run.toml", f"[trainer]\nlr = {word}")])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--seed", "18446744073709551616"], "seed is 18446744073709551616; use 0 or more"),
        (["--group-size", "100000000"], "group_size is 100000000; use"),
        (["--group-size", "65536", "--prompts-per-step", "64"], "are 8,388,608 samples; use at most 1,000,000"),
        (["--max-staleness", "9999", "--steps", "10000"], "10000 steps at once (staleness 9999)"),
        (["--build.heads", "5"], "build.heads is 5"),
        (["--rollout.stop", "end\ufffd"], "with the character U+FFFD, which is what bytes are decoded to"),
    ],
)
def test_combinations_of_numbers_that_are_too_large_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse(settings)


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_sample_seeds_can_be_derived_from_the_largest_numbers(seed: int) -> None:
    check(with_value("seed", seed))
    derived = sample_seed(seed, prompt=2**63 - 1, epoch=2**63 - 1, member=2**63 - 1, attempt=2**63 - 1)
    torch.Generator().manual_seed(derived)
    torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", ["run_dir", "data.path", "controller.bind", "rollout.sglang.stage"])
@pytest.mark.parametrize(("text", "message"), [("a\0b", "with a NUL in it"), ("a\udcff", "bytes that are not text")])
def test_text_with_a_nul_or_invalid_unicode_is_refused(name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is 'a.*', .*{message}"):
        check(with_value(name, text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"seed = {'9' * 5000}", "is not TOML"),
        (f"[trainer]\nlr = 1{'0' * 400}", "'trainer.lr' is a number of 401 digits"),
        (f"x = {'[' * 100_000}", "nested too deeply"),
        ("seed = ", "is not TOML"),
        ("\0", "is not TOML"),
    ],
    ids=["a number of 5000 digits", "an integer above every float", "deep nesting", "no value", "a NUL"],
)
def test_an_unreadable_config_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(["--config", write(tmp_path / "run.toml", text)])


def test_a_config_path_that_is_not_a_regular_file_is_refused(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (fifo, tmp_path, Path("/dev/zero")):
        with pytest.raises(ConfigError, match=f"config file {path} is not a regular file"):
            parse(["--config", str(path)])
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        parse(["--config", str(tmp_path / "nowhere.toml")])


# ---- documentation


@functools.cache
def documented_fields() -> dict[str, str]:
    """The docstring of every field that is a flag, by its dotted name."""
    return dict(_documented_fields(RunConfig, ""))


def _documented_fields(table: Any, prefix: str) -> Iterator[tuple[str, str]]:
    docs: dict[str, str] = {}
    for kind in table.__mro__[:-1]:  # but object
        docs = {**_field_docs(kind), **docs}
    for name, hint in get_type_hints(table).items():
        if kinds := variants(hint):
            for kind in kinds.values():
                yield from _documented_fields(kind, f"{prefix}{name}.")
            yield f"{prefix}{name}.type", meaning_of_type(kinds)
        elif dataclasses.is_dataclass(hint):
            yield from _documented_fields(hint, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", docs.get(name, "")


def _field_docs(kind: type) -> dict[str, str]:
    """The string after each field of a class."""
    body = ast.parse(inspect.getsource(kind)).body[0].body  # type: ignore[attr-defined]
    return {
        statement.target.id: inspect.cleandoc(following.value.value)
        for statement, following in itertools.pairwise(body)
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and isinstance(following, ast.Expr)
        and isinstance(following.value, ast.Constant)
        and isinstance(following.value.value, str)
    }


@pytest.fixture(scope="module")
def help_text() -> str:
    """The help on all keys, and on those of all types of each table with types."""
    tables = [name.removesuffix(".type") for name, _ in leaves(RunConfig) if name.endswith(".type")]
    assert "dispatch" in tables
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setenv("COLUMNS", "100")
        for topic in ("all", *tables):
            with pytest.raises(SystemExit):
                main(["run", "--help", topic])
    return squeeze(printed.getvalue())


def squeeze(text: str) -> str:
    """Without white space: lines are folded at blanks and at hyphens."""
    return "".join(text.split())


def test_the_help_lists_the_page_exporters_and_task_files(help_text: str) -> None:
    for text in ("--watch [PORT] serves the page", "--exporters TEXT", "a task of your own is FILE.py"):
        assert squeeze(text) in help_text


def test_every_section_of_the_configuration_is_documented() -> None:
    sections = {name.split(".")[0] for name in documented_fields() if "." in name}
    assert sections == {name for name, value in vars(RunConfig()).items() if dataclasses.is_dataclass(value)}
    assert len(documented_fields()) > 45


@pytest.mark.parametrize("name", dict(leaves(RunConfig)))
def test_every_field_is_explained_in_one_sentence(name: str, help_text: str) -> None:
    doc = documented_fields()[name]
    assert doc, f"{name} has no docstring"
    assert doc.endswith(".")
    assert ". " not in doc, f"{name} is explained in more than one sentence"
    assert doc[0].isupper()
    # A flag, its type or choices, its sentence, its bounds if it is a number.
    flag = re.escape("--data" if name == "data.sets" else "--" + name.replace("_", "-"))
    hint = numeric_fields().get(name)
    interval = interval_of(hint)
    bounds = "" if interval is None else squeeze(f"({span(interval, get_args(hint)[0])}; default")
    kinds = r"(TEXT(\.\.\.)?|INT|FLOAT|\{[\w,]+\})"
    assert re.search(flag + kinds + re.escape(squeeze(doc).removesuffix(".") + bounds), help_text), name


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--trainer.lora.rank", "4"], "with trainer.engine torch; set trainer.engine to fsdp"),
        (["--trainer.fsdp.device", "tpu"], "--trainer.fsdp.device takes one of auto, cpu, cuda, npu, not 'tpu'"),
        (["--trainer.device", "gpu"], "--trainer.device takes one of auto, cpu, cuda, npu, not 'gpu'"),
        (["--device", "gpu"], "--device takes one of auto, cpu, cuda, npu, not 'gpu'"),
        (
            ["--trainer.engine", "fsdp", "--trainer.device", "cpu"],
            "with trainer.engine fsdp; set trainer.fsdp.device in its place",
        ),
        (
            ["--trainer.engine", "fsdp", "--trainer.dtype", "bfloat16"],
            "with trainer.engine fsdp; set trainer.fsdp.dtype in its place",
        ),
        (["--trainer.schedule", "linear", "--trainer.min-lr", "2"], "^trainer.min_lr is 2.0, above trainer.lr"),
        (
            ["--trainer.engine", "fsdp", "--trainer.compile", "True", "--trainer.fsdp.recompute", "True"],
            "^trainer.compile changes nothing with",
        ),
    ],
)
def test_unsupported_options_of_a_training_engine_are_refused(flags: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence.replace(".", r"\.")):
        parse(flags)


@pytest.mark.parametrize("flag", ["--data", "--data.path"])
def test_data_without_a_recipe_selects_the_custom_recipe(tmp_path: Path, flag: str) -> None:
    rows, toml = tmp_path / "rows.jsonl", tmp_path / "run.toml"
    rows.write_text('{"question": "1+1?", "answer": "#### 2"}\n')
    toml.write_text('recipe = "gsm8k"\n')
    assert parse([flag, str(rows)]).recipe == "custom"
    assert parse([f"{flag}={rows}"]).recipe == "custom"
    assert parse(["gsm8k", flag, str(rows)]).recipe == "gsm8k"
    assert parse(["--config", str(toml), flag, str(rows)]).recipe == "gsm8k"
    assert parse(["--data.epochs", "2"]).recipe == RECIPE_NAMES[0]
