"""Difficulty of rows: limits, order, and refused values."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.errors import ConfigError
from flowrt.recipes.config_io import from_toml, parse, to_toml
from flowrt.recipes.data.difficulty import Selection, difficulties
from flowrt.recipes.data.files import open_rows
from flowrt.recipes.data.mixture import SetSize, mixture
from flowrt.recipes.data_config import DataConfig
from flowrt.recipes.tasks.custom import CustomTask
from flowrt.recipes.tasks.problems import check_rows, open_sets
from flowrt.rewards.options import RewardOptions


def write(path: Path, levels: list[Any]) -> Path:
    rows = [{"prompt": f"p{n}", "answer": "1", "more": {"level": level}} for n, level in enumerate(levels)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def data(path: Path, **options: Any) -> DataConfig:
    return DataConfig(
        path=str(path), prompt_key="prompt", difficulty_key="more.level", **{"eval_prompts": 1, **options}
    )


def test_rows_within_the_limits_are_used(tmp_path: Path) -> None:
    options = data(write(tmp_path / "rows.jsonl", [5, 1, 2.5, 9, 3, 4.0]), min_difficulty=2.0, max_difficulty=5.0)
    [opened] = open_sets(options)
    check_rows([opened], options)
    assert [problem.prompt for problem in opened.training] == ["p0", "p2", "p4"]
    assert [problem.prompt for problem in opened.held_out] == ["p5"]
    assert opened.rows.where(1) == f"data file {tmp_path / 'rows.jsonl'}, line 3"
    assert [opened.rows.row(at) for at in range(4)] == list(opened.rows.scan())


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 30).flatmap(lambda count: st.tuples(st.just(count), st.sets(st.integers(0, max(count - 1, 0))))))
def test_a_selection_contains_the_rows_at_its_places(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[int, set[int]]
) -> None:
    count, chosen = drawn
    path = write(tmp_path_factory.getbasetemp() / "selected.jsonl", list(range(count + 1)))
    rows = open_rows(path)
    places = sorted(chosen)
    selection = Selection(rows, places)
    expected = [rows.row(at) for at in places]
    assert list(selection.scan()) == [selection.row(at) for at in range(len(selection))] == expected


def test_easy_first_sorts_the_rows_in_every_epoch(tmp_path: Path) -> None:
    options = data(write(tmp_path / "rows.jsonl", [3, 1, 2, 1, 9]), order="easy_first")
    [opened] = open_sets(options)
    assert list(opened.difficulties) == [3, 1, 2, 1, 9]
    [training_set] = CustomTask(options, RewardOptions()).training_sets()
    sizes = [SetSize(training_set.name, training_set.weight, len(training_set.problems), training_set.difficulties)]
    places = list(islice(mixture(sizes, None, 0, lambda place: (place.epoch, place.row)), 8))
    assert places == [(epoch, row) for epoch in (0, 1) for row in (1, 3, 2, 0)]


def test_without_a_seed_rows_keep_their_order() -> None:
    sizes = [SetSize("a", 1.0, 3), SetSize("b", 1.0, 2)]
    places = list(islice(mixture(sizes, None, 0, lambda place: place), 8))
    assert [(place.epoch, place.row) for place in places if place.data_set == 0] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert [(place.epoch, place.row) for place in places if place.data_set == 1] == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("level", "message"),
    [
        ("hard", r"line 2: field 'more\.level' is 'hard', not a finite number \(data\.difficulty_key\)"),
        (None, r"line 2: field 'more\.level' is None, not a finite number"),
        (True, r"line 2: field 'more\.level' is True, not a finite number"),
        (float("nan"), r"line 2: field 'more\.level' is nan, not a finite number"),
        (10**400, r"line 2: field 'more\.level' is 1000.*, not a finite number"),
    ],
)
def test_non_numeric_difficulties_are_refused(tmp_path: Path, level: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        difficulties(open_rows(write(tmp_path / "rows.jsonl", [1, level, 2])), "more.level")


def test_rows_without_a_difficulty_are_reported(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [1, 2])
    with pytest.raises(
        ConfigError, match=r"2 mistakes in the data: .*line 1 has no field 'level' \(data\.difficulty_key\)"
    ):
        difficulties(open_rows(path), "level")
    with pytest.raises(ConfigError, match=r"has 2 rows, and none with a difficulty within .*: more\.level is 1 to 2"):
        open_sets(data(path, min_difficulty=7.0))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--data.min-difficulty", "1"],
            r"data\.min_difficulty is 1\.0, which changes nothing with data\.diff",
        ),
        (
            ["--data.max-difficulty", "1"],
            r"data\.max_difficulty is 1\.0, which changes nothing with data\.diff",
        ),
        (["--data.order", "easy_first"], r"data\.order is easy_first, and data\.difficulty_key is empty"),
        (["--data.difficulty-key", "d"], r"data\.difficulty_key is set and changes nothing"),
        (
            ["--data.difficulty-key", "d", "--data.min-difficulty", "2", "--data.max-difficulty", "1"],
            r"data\.min_difficulty is 2, above data\.max_difficulty \(1\); no row is left",
        ),
        (["--data.difficulty-key", "d", "--data.min-difficulty", "nan"], r"data\.min_difficulty is nan; use"),
    ],
)
def test_inconsistent_options_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(["custom", *flags])


def test_difficulty_options_are_only_for_the_custom_recipe() -> None:
    with pytest.raises(ConfigError, match=r"data\.difficulty_key changes nothing in recipe gsm8k"):
        parse(["gsm8k", "--data.difficulty-key", "d"])
    config = parse(["custom", "--data.difficulty-key", "d", "--data.max-difficulty", "0.5"])
    assert from_toml(to_toml(config)) == config
    assert parse(["arithmetic", "--data.order", "as_is"]).data.order == "as_is"
