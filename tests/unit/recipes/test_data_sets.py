"""Several data sets: flags and tables, refused values, held-out rows, and checks of rows."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowrt.errors import ConfigError
from flowrt.recipes.config_io import from_toml, parse, to_toml
from flowrt.recipes.data_config import DataConfig, DataSetConfig
from flowrt.recipes.data_sets import parse_data
from flowrt.recipes.grpo import settings
from flowrt.recipes.resume_overrides import apply_overrides
from flowrt.recipes.tasks.problems import check_rows, open_sets
from flowrt.recipes.tasks.registry import task_of

THREE_SETS = ["--data", "math=a.jsonl:0.7", "--data=code=dir/:0.2", "--data", "chat=c:d.jsonl:.1"]


def write(path: Path, prompts: Sequence[Any], **columns: Any) -> Path:
    rows = [{"prompt": prompt, "answer": str(n), **columns} for n, prompt in enumerate(prompts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_sets_are_configured_by_flags_or_tables(tmp_path: Path) -> None:
    config = parse(["custom", *THREE_SETS])
    assert config.data.sets == (
        DataSetConfig("math", "a.jsonl", 0.7),
        DataSetConfig("code", "dir/", 0.2),
        DataSetConfig("chat", "c:d.jsonl", 0.1),
    )
    assert config.data.path == ""
    assert from_toml(to_toml(config)) == config
    assert settings(config).data_sets == ("math", "code", "chat")
    file = tmp_path / "run.toml"
    file.write_text(
        'recipe = "custom"\n[[data.sets]]\nname = "a"\npath = "x"\nweight = 2\n[[data.sets]]\nname = "b"\npath = "y"\n'
    )
    from_file = parse(["--config", str(file)])
    assert from_file.data.sets == (DataSetConfig("a", "x", 2.0), DataSetConfig("b", "y", 1.0))
    assert parse(["--config", str(file), "--data", "c=z:3"]).data.sets == (DataSetConfig("c", "z", 3.0),)
    assert parse(["--config", str(file), "--data", "rows.jsonl"]).data.path == "rows.jsonl"
    assert parse(["--config", str(file), "--data", "rows.jsonl"]).data.sets == ()


@pytest.mark.parametrize(
    ("flag", "path"),
    [
        ("rows.jsonl", "rows.jsonl"),
        ("./a=b.jsonl", "./a=b.jsonl"),
        ("/data/split=train/rows.jsonl", "/data/split=train/rows.jsonl"),
        ("dir/x:0.5", "dir/x:0.5"),
    ],
)
def test_a_single_path_is_not_a_named_set(flag: str, path: str) -> None:
    assert parse_data([flag]) == (path, [])


def test_a_colon_in_a_directory_name_is_not_a_weight() -> None:
    assert parse_data(["a=x:1/rows.jsonl"]) == ("", [{"name": "a", "path": "x:1/rows.jsonl"}])
    assert parse_data(["a=x:1/rows.jsonl:2"]) == ("", [{"name": "a", "path": "x:1/rows.jsonl", "weight": 2.0}])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["a=x:-1", "b=y:1"], r"data\.sets\[0\]\.weight is -1\.0; use a value above 0, and at most 1,000,000"),
        (["a=x:0", "b=y:0"], r"data\.sets\[0\]\.weight is 0\.0; use a value above 0, and at most 1,000,000"),
        (["a=x:1", "b=y:nan"], r"data\.sets\[1\]\.weight is nan; use a value above 0, and at most 1,000,000"),
        (["a=x:inf"], r"data\.sets\[0\]\.weight is inf; use"),
        (["a=x:half"], r"--data 'a=x:half': the weight is 'half', which is not a number; use NAME=PATH:WEIGHT"),
        (["a=x:"], r"the weight is '', which is not a number"),
        (["a=:1"], "data set 'a' has no path"),
        (["=x:1"], r"a data set has the name ''; use 1 to 64 letters, digits, - and _"),
        (["a b=x:1"], r"a data set has the name 'a b'; use 1 to 64 letters"),
        (["réponse=x:1"], "a data set has the name 'réponse'; use 1 to 64 letters"),
        (["a.b=x:1"], r"a data set has the name 'a\.b'; use"),
        (["-a=x:1"], "a data set has the name '-a'; use"),
        (["\x1b[31m=x:1"], r"a data set has the name '\\x1b\[31m'; use"),
        ([f"{'a' * 65}=x:1"], "a data set has the name 'a+.*'; use"),
        (["a=x:1", "a=y:1"], "two data sets have the name 'a'; give each one of its own"),
        (["a=x:1", "b=./x:2"], r"data sets 'a' and 'b' have the same path \./x, and prompts would count twice"),
        (["x.jsonl", "b=y:1"], r"--data 'x\.jsonl' is one of 2 data sets and has no name; use NAME=PATH:WEIGHT"),
        (["x.jsonl", "y.jsonl"], r"--data 'x\.jsonl' is one of 2 data sets and has no name"),
        ([""], r"--data needs a value, a path or NAME=PATH:WEIGHT"),
        ([f"set-{n}=x{n}" for n in range(101)], "there are 101 data sets; use at most 100"),
    ],
)
def test_invalid_set_flags_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(["custom", *(f"--data={flag}" for flag in flags)])


def test_sets_without_effect_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.sets changes nothing in recipe gsm8k; it is of recipe custom"):
        parse(["gsm8k", "--data", "a=x:1"])
    with pytest.raises(ConfigError, match=r"data\.path is 'x', and there are data\.sets too; leave one of them out"):
        parse(["custom", "--data.path", "x", "--data", "a=x:1"])
    with pytest.raises(ConfigError, match=r"data\.split is 'test', and .* is a file; a split is of a directory"):
        parse(["custom", "--data", f"a={__file__}:1", "--data.split", "test"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[data]\nsets = ["a"]', r"'data\.sets' takes tables \[\[data\.sets\]\] with keys, not \['a'\]"),
        ('[[data.sets]]\npath = "x"', r"a table \[\[data\.sets\]\] has no key 'name'"),
        ('[[data.sets]]\nname = "a"', r"a table \[\[data\.sets\]\] has no key 'path'"),
        ('[[data.sets]]\nname = "a"\npath = "x"\nweight = "1"', r"'data\.sets\.weight' takes float, not str '1'"),
        ('[[data.sets]]\nname = "a"\npath = "x"\nshare = 1', r"there is no key 'data\.sets\.share'"),
        ('[[data.sets]]\nname = "a"\npath = "x"\nweigth = 1', r"'data\.sets\.weigth'.*weight"),
    ],
)
def test_invalid_set_tables_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'recipe = "custom"\n{text}\n')
    with pytest.raises(ConfigError, match=message):
        parse(["--config", str(file)])


def test_a_resumed_run_keeps_its_sets() -> None:
    config = parse(["custom", *THREE_SETS])
    assert apply_overrides(config, ["--steps", "9"]).data.sets == config.data.sets
    other = ["--data", "math=a.jsonl:0.6", "--data", "code=dir/:0.4"]
    with pytest.raises(
        ConfigError,
        match=r"data\.sets is math=a\.jsonl:0\.7 code=dir/:0\.2 chat=c:d\.jsonl:0\.1 in .*, and stays that when the "
        r"run is resumed, not math=a\.jsonl:0\.6 code=dir/:0\.4",
    ):
        apply_overrides(config, other)


def test_metrics_of_each_set_can_be_guarded() -> None:
    parse(["custom", *THREE_SETS, "--guard", "reward_of/code below 0.1 steps=5"])
    with pytest.raises(ConfigError, match="this run has no such metric"):
        parse(["custom", "--data", "a=x", "--guard", "reward_of/a below 0.1"])


# ---- rows


def sets(tmp_path: Path, *parts: tuple[str, Sequence[Any], float]) -> tuple[DataSetConfig, ...]:
    return tuple(
        DataSetConfig(name, str(write(tmp_path / f"{name}.jsonl", prompts)), weight) for name, prompts, weight in parts
    )


def numbered(name: str, count: int) -> list[str]:
    return [f"{name} {n}" for n in range(count)]


def test_the_last_rows_of_each_set_are_held_out_in_proportion_to_the_weights(tmp_path: Path) -> None:
    data = DataConfig(
        prompt_key="prompt",
        eval_prompts=5,
        sets=sets(tmp_path, ("a", numbered("a", 9), 0.7), ("b", numbered("b", 4), 0.3)),
    )
    opened = open_sets(data)
    assert [len(data_set.held_out) for data_set in opened] == [4, 1]  # 3.5 and 1.5: ties go to the first
    check_rows(opened, data)
    assert [problem.prompt for problem in opened[1].training] == ["b 0", "b 1", "b 2"]


def test_a_set_with_too_many_rows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrt.recipes.tasks.problems.MAX_ROWS", 8)
    configs = sets(tmp_path, ("a", numbered("a", 8), 0.5), ("b", numbered("b", 9), 0.5))
    with pytest.raises(ConfigError, match="data set 'b' has 9 rows; use at most 8, or split it"):
        open_sets(DataConfig(eval_prompts=0, sets=configs))


def test_a_set_with_too_few_rows_for_its_held_out_share_is_refused(tmp_path: Path) -> None:
    configs = sets(tmp_path, ("a", numbered("a", 9), 0.5), ("b", numbered("b", 4), 0.5))
    with pytest.raises(
        ConfigError,
        match=r"data set 'b' has 4 rows, no more than the 4 that are held out, its share of data\.eval_prompts=8; use "
        r"fewer, 0, or name other data to evaluate with eval\.data",
    ):
        open_sets(DataConfig(prompt_key="prompt", eval_prompts=8, sets=configs))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, r"data set 'b': data file .*none\.jsonl does not exist"),
        ("empty.jsonl", "", r"data set 'b': data file .*empty\.jsonl is empty; it needs at least one row"),
        ("blank.jsonl", "\n \n", r"data set 'b': data file .*blank\.jsonl is empty"),
        ("dir", "directory", r"data set 'b': data file .*dir is a directory without files of rows"),
    ],
)
def test_an_unreadable_set_is_reported_by_name(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    path = tmp_path / name
    if content == "directory":
        path.mkdir()
    elif content is not None:
        path.write_text(content)
    configs = (*sets(tmp_path, ("a", numbered("a", 9), 0.5)), DataSetConfig("b", str(path), 0.5))
    with pytest.raises(ConfigError, match=message):
        open_sets(DataConfig(prompt_key="prompt", eval_prompts=0, sets=configs))


def test_mistakes_in_all_sets_are_reported_together(tmp_path: Path) -> None:
    data = DataConfig(
        prompt_key="prompt",
        eval_prompts=0,
        sets=sets(tmp_path, ("a", ["fine", 5], 0.5), ("b", ["", "fine too"], 0.5)),
    )
    with pytest.raises(ConfigError) as refused:
        check_rows(open_sets(data), data)
    message = str(refused.value)
    assert message.startswith(f"2 mistakes in the data: data file {tmp_path}/a.jsonl, line 2: field 'prompt' is int")
    assert f"; data file {tmp_path}/b.jsonl, line 1: field 'prompt', the prompt, is empty" in message


def test_equal_mistakes_are_reported_once_with_their_rows(tmp_path: Path) -> None:
    data = DataConfig(
        prompt_key="prompt", eval_prompts=0, sets=sets(tmp_path, ("a", ["", "fine", "", ""], 0.5), ("b", ["", 5], 0.5))
    )
    with pytest.raises(ConfigError) as refused:
        check_rows(open_sets(data), data)
    message = str(refused.value)
    assert message.startswith(
        f"5 mistakes in the data: data file {tmp_path}/a.jsonl, line 1: field 'prompt', the prompt,"
    )
    assert f" (also lines 3, 4); data file {tmp_path}/b.jsonl, line 1: field 'prompt'" in message
    assert f"; data file {tmp_path}/b.jsonl, line 2: field 'prompt' is int" in message
    assert message.count("is empty") == 2


def test_a_training_prompt_held_out_in_another_set_is_refused(tmp_path: Path) -> None:
    data = DataConfig(
        prompt_key="prompt",
        eval_prompts=2,
        sets=sets(tmp_path, ("a", ["one", "same", "last a"], 0.5), ("b", ["two", " same \n"], 0.5)),
    )
    with pytest.raises(
        ConfigError,
        match=r"a\.jsonl, line 2: the prompt is also held out for the evaluation, as 1 training prompts are \(the last "
        r"2 rows of the sets, in proportion to their weights, are held out\)",
    ):
        check_rows(open_sets(data), data)


def test_answers_may_be_absent_from_whole_sets_but_not_from_single_rows(tmp_path: Path) -> None:
    configs = sets(tmp_path, ("a", ["one", "two"], 0.5))
    plain = tmp_path / "b.jsonl"
    plain.write_text('{"prompt": "three"}\n{"prompt": "four"}\n')
    data = DataConfig(prompt_key="prompt", eval_prompts=0, sets=(*configs, DataSetConfig("b", str(plain), 0.5)))
    check_rows(open_sets(data), data)
    plain.write_text('{"prompt": "three"}\n{"prompt": "four", "answer": 4}\n')
    with pytest.raises(ConfigError, match=r"b\.jsonl, line 1 has no field 'answer'; .*leave the column out of every"):
        check_rows(open_sets(data), data)


def test_a_task_mixes_its_sets(tmp_path: Path) -> None:
    configs = sets(tmp_path, ("a", numbered("a", 6), 0.5), ("b", numbered("b", 3), 0.25))
    base = parse(
        [
            "custom",
            "--data.eval-prompts",
            "3",
            *(f"--data={config.name}={config.path}:{config.weight}" for config in configs),
        ]
    )
    (tmp_path / "mine.py").write_text("def reward(response, answer):\n    return 0.0\n")
    reward = replace(base.reward, functions=(str(tmp_path / "mine.py"),))
    task = task_of(replace(base, model=str(tmp_path), reward=reward))
    assert [(set_.name, set_.weight, len(set_.problems)) for set_ in task.training_sets()] == [
        ("a", 0.5, 4),
        ("b", 0.25, 2),
    ]
    assert [problem.prompt for problem in task.held_out_problems()] == ["a 4", "a 5", "b 2"]
    training = task.training_problems()
    assert [problem.prompt for problem in training] == [training[at].prompt for at in range(6)]
    assert [problem.prompt for problem in training[3:5]] == ["a 3", "b 0"]
    assert training[-1].prompt == "b 1"
