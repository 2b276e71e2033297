"""Groups and distributions of a sample store: which samples are counted, orders, pages, and stores of real size."""

import dataclasses
import json
import math
import re
import shlex
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from flowrt.cli import main
from flowrt.controller.storage.sample_store import SAMPLES, GroupEnd, SampleWriter, create_sample_file
from flowrt.errors import ConfigError
from flowrt.ids import prompt_number
from flowrt.launcher.views.sample_tables import By, bin_name
from flowrt.observability import sample_statistics
from flowrt.observability.json_text import to_json
from flowrt.observability.run_reader import RunReader
from flowrt.observability.sample_statistics import GROUP_ORDERS, SampleSettings, SampleStatistics
from flowrt.observability.stored_samples import SORTED, SampleFilter, SampleReader
from flowrt.protocol.sample_records import ScoredSample, TrainedSample, encode_record, pack_text
from flowrt.recipes.config_io import defaults, to_toml
from flowrt.recipes.eval_names import first_number

GROUP = 4
SETTINGS = SampleSettings(group_size=GROUP)


def scored(prompt: int, member: int, reward: float, **changed: Any) -> ScoredSample:
    """A sample of ``member + 3`` tokens of version 0."""
    sample = ScoredSample(
        flow="train",
        eval_name="",
        epoch=0,
        prompt=prompt,
        member=member,
        attempt=0,
        reward=reward,
        parts=(),
        finish="stop",
        reason="",
        is_single=False,
        spans=(0, member + 3),
        reward_s=0.0,
        data=(pack_text(f"prompt {prompt}"), pack_text(f"answer {member}"), b""),
    )
    return msgspec.structs.replace(sample, **changed)


class Store:
    """A sample store that is being written."""

    def __init__(self, run_dir: Path, run_attempt: int = 1, step: int = 0) -> None:
        self._writer = SampleWriter(
            run_dir / SAMPLES, per_step=1000, max_bytes=1 << 30, run_attempt=run_attempt, step=step
        )

    def write(self, *samples: ScoredSample | TrainedSample, ends: tuple[GroupEnd, ...] = (), step: int = 0) -> None:
        records = [(encode_record(sample) or b"", step) for sample in samples]
        assert not self._writer.write(records, ends)

    def train(self, prompt: int, rewards: list[float], *, step: int = 0, **changed: Any) -> None:
        """Write a group that was trained in a step."""
        samples = [scored(prompt, member, reward, **changed) for member, reward in enumerate(rewards)]
        centre = sum(rewards) / len(rewards)
        trained = [
            TrainedSample(step, sample.epoch, prompt, sample.member, sample.attempt, sample.reward - centre, (b"", b""))
            for sample in samples
        ]
        self.write(*samples, *trained, ends=(GroupEnd(samples[0].epoch, prompt, step),), step=step)


def groups(run_dir: Path, order: str = "oldest", **conditions: Any) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = SampleStatistics(run_dir).groups(SampleFilter(**conditions), SETTINGS, order, 1000)[
        "groups"
    ]
    return result


def distributions(run_dir: Path, **conditions: Any) -> dict[str, Any]:
    return SampleStatistics(run_dir).distributions(SampleFilter(**conditions), SETTINGS)


def test_a_group_has_the_numbers_of_its_samples(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.train(7, [0.0, 1.0, 1.0, 0.5], step=3, spans=(2, 5))
    store.write(scored(7, 0, 0.0, finish="length"))
    [group] = groups(tmp_path)
    assert group == {
        "id": 1,
        "step": 3,
        "run_attempt": 1,
        "epoch": 0,
        "prompt": 7,
        "size": 4,
        "scored": 4,
        "right": 2,
        "truncated": 1,
        "reward": 0.625,
        "spread": pytest.approx(math.sqrt(0.6875 / 3)),
        "tokens": pytest.approx((3 + 5 + 5 + 5) / 4),
        "least_tokens": 3,
        "most_tokens": 5,
        "staleness": pytest.approx(3.0),
        "is_rolled_back": False,
        "name": "7",
        "eval_name": "",
        "prompt_text": "prompt 7",
    }
    json.loads(to_json(group))


def test_samples_of_a_group_are_found_by_any_of_them_and_sorted_by_every_column(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for prompt in range(3):
        store.train(prompt, [0.1 * prompt, 0.5, 0.2, 0.9], step=prompt)
    reader = SampleReader(tmp_path)
    whole = reader.query(SampleFilter(group_of=6), "member").samples
    assert [(row.prompt, row.member) for row in whole] == [(1, member) for member in range(4)]
    for name in SORTED:
        for sign, step in (("", 1), ("-", -1)):
            rows = reader.query(order=f"{sign}{name}", limit=100).samples
            assert len(rows) == 12
            values = [row.finish + row.reason if name == "ended" else getattr(row, name) for row in rows]
            assert values == sorted(values, reverse=step < 0)
    with pytest.raises(ConfigError, match="samples have no order '-none'; use one of newest"):
        reader.query(order="-none")


def test_samples_without_a_number_are_the_last_in_both_directions(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write(*(scored(0, member, 0.0) for member in range(4)))
    store.train(1, [0.0, 1.0, 0.0, 0.0])
    for order in ("advantage", "-advantage"):
        rows = SampleReader(tmp_path).query(order=order).samples
        assert [row.advantage is None for row in rows] == [False] * 4 + [True] * 4


def test_groups_are_sorted_by_every_column_and_paged(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for prompt in range(12):
        store.train(prompt, [prompt % 3, prompt % 5, 1.0, 0.0], step=prompt // 2, spans=(0, 1 + prompt % 4))
    statistics = SampleStatistics(tmp_path)
    for name in GROUP_ORDERS:
        for sign in ("", "-"):
            listed = groups(tmp_path, sign + name)
            values = [group[name] for group in listed]
            assert values == sorted(values, reverse=sign == "-")
            pages = [statistics.groups(SampleFilter(), SETTINGS, sign + name, 5, first) for first in (0, 5, 10, 15)]
            assert [group for page in pages for group in page["groups"]] == listed
            assert {page["total"] for page in pages} == {12}
    assert [group["reward"] for group in groups(tmp_path, "worst")] == [
        group["reward"] for group in groups(tmp_path, "reward")
    ]
    assert sorted(group["prompt"] for group in groups(tmp_path, "random")) == list(range(12))
    with pytest.raises(ConfigError, match="groups have no order 'advantage'; use one of newest"):
        groups(tmp_path, "advantage")


def test_samples_that_were_stored_without_their_group_are_in_no_group_and_no_distribution(tmp_path: Path) -> None:
    """They were chosen because they are truncated, or their reward failed, and would distort every mean."""
    store = Store(tmp_path)
    store.train(0, [1.0, 0.0, 1.0, 1.0])
    store.write(
        *(scored(prompt, 2, 0.0, is_single=True, finish="length") for prompt in range(1, 5)),
        scored(5, 0, 0.0, is_single=True, reason="timeout: 10 s"),
    )
    assert SampleReader(tmp_path).count == 9
    assert [group["prompt"] for group in groups(tmp_path)] == [0]
    figures = distributions(tmp_path)
    assert (figures["samples"], figures["truncated"]) == (4, 0)


def test_dropped_groups_are_listed_and_counted_on_request(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.train(0, [1.0, 0.0, 1.0, 1.0])
    dropped = [scored(1, member, 0.0) for member in range(GROUP)]
    store.write(*dropped, ends=(GroupEnd(0, 1, 0, "filtered: equal rewards"),))
    assert [group["prompt"] for group in groups(tmp_path)] == [0, 1]
    assert distributions(tmp_path)["samples"] == 4
    with_dropped = SampleStatistics(tmp_path).distributions(SampleFilter(), SETTINGS, with_dropped=True)
    assert [(solve_rate["name"], solve_rate["prompts"]) for solve_rate in with_dropped["solve_rates"]] == [
        ("none right", 1),
        ("50 to 75 %", 1),
    ]


def test_a_sample_to_which_no_function_applies_has_no_reward(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.train(0, [1.0, 0.0, 1.0, 0.0])
    store.write(scored(0, 3, 0.0, reason="not_applicable"))
    [group] = groups(tmp_path)
    assert (group["scored"], group["right"], group["reward"]) == (3, 2, pytest.approx(2 / 3))
    figures = distributions(tmp_path)
    assert (figures["samples"], figures["without_reward"], sum(figures["reward"]["count"])) == (4, 1, 3)
    store.write(*(scored(1, member, 0.0, reason="not_applicable") for member in range(GROUP)))
    group = groups(tmp_path)[-1]
    assert json.loads(to_json([group["reward"], group["spread"]])) == [None, None]
    for order in ("reward", "-reward"):
        assert [group["prompt"] for group in groups(tmp_path, order)] == [0, 1]


def test_a_sample_that_was_generated_again_counts_once(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.train(0, [1.0, 1.0, 1.0, 1.0])
    store.write(scored(0, 3, 0.0, attempt=1))
    [group] = groups(tmp_path)
    assert (group["size"], group["right"]) == (4, 3)


def test_steps_that_were_rolled_back_are_marked_and_not_counted(tmp_path: Path) -> None:
    Store(tmp_path).train(0, [0.0] * 4, step=5)
    again = Store(tmp_path, run_attempt=2, step=5)
    again.train(0, [1.0] * 4, step=5)
    assert [(group["reward"], group["is_rolled_back"]) for group in groups(tmp_path)] == [(1.0, False), (0.0, True)]
    figures = distributions(tmp_path)
    assert (figures["samples"], figures["sets"][0]["reward"]) == (4, 1.0)
    assert [solve_rate["name"] for solve_rate in figures["solve_rates"]] == ["all right"]


def test_evaluated_prompts_are_a_group_for_each_version(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for version in (0, 4):
        store.write(
            *(
                scored(9, member, member / 2, flow="eval", eval_name="held_out", spans=(version, 3))
                for member in range(3)
            )
        )
    listed = groups(tmp_path, eval_name="held_out")
    assert [(group["step"], group["size"], group["name"], group["staleness"]) for group in listed] == [
        (0, 3, "held_out:9", pytest.approx(math.nan, nan_ok=True)),
        (4, 3, "held_out:9", pytest.approx(math.nan, nan_ok=True)),
    ]
    members = SampleReader(tmp_path).query(SampleFilter(group_of=listed[1]["id"], eval_name="held_out")).samples
    assert [row.step for row in members] == [4, 4, 4]
    of = distributions(tmp_path, eval_name="held_out")
    assert (of["samples"], of["steps"], [data_set["name"] for data_set in of["sets"]]) == (6, [0, 4], ["held_out"])
    assert distributions(tmp_path)["samples"] == 0
    assert groups(tmp_path) == []


def test_conditions_on_samples_choose_groups_whose_numbers_stay_those_of_all(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.train(0, [0.0, 1.0, 0.0, 0.0], step=0)
    store.train(1, [0.0, 1.0, 1.0, 1.0], step=1, data=(pack_text("other"), pack_text("no"), b""))
    assert [(group["prompt"], group["size"]) for group in groups(tmp_path, grep="answer 2")] == [(0, 4)]
    assert [group["prompt"] for group in groups(tmp_path, grep="other")] == [1]
    assert [group["prompt"] for group in groups(tmp_path, first_step=1)] == [1]
    assert [group["size"] for group in groups(tmp_path, min_tokens=6)] == [4, 4]
    assert distributions(tmp_path, min_tokens=6)["samples"] == 2
    assert distributions(tmp_path, grep="answer 2")["samples"] == 1
    with pytest.raises(ConfigError, match="is not a regular expression"):
        distributions(tmp_path, grep="(")


def test_means_by_data_set_and_by_solve_rate(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first, second = prompt_number(0, 3), prompt_number(1, 3)
    store.train(first, [1.0] * 4, step=0)
    store.train(first, [0.0] * 4, step=9, epoch=1)
    store.train(second, [0.0, 0.0, 0.0, 90.0], step=9)
    settings = dataclasses.replace(SETTINGS, set_names=("sums", "words"), right_from=1.0)
    statistics = SampleStatistics(tmp_path)
    figures = statistics.distributions(SampleFilter(), settings)
    assert [
        (data_set["name"], data_set["samples"], data_set["reward"], data_set["right"]) for data_set in figures["sets"]
    ] == [
        ("sums", 8, 0.5, 0.5),
        ("words", 4, 22.5, 0.25),
    ]
    # The solve rate of a prompt is over all steps, whatever steps are chosen.
    last = statistics.distributions(SampleFilter(first_step=9), settings)
    assert [
        (solve_rate["name"], solve_rate["samples"], solve_rate["reward"]) for solve_rate in last["solve_rates"]
    ] == [
        ("up to 25 %", 4, 22.5),
        ("25 to 50 %", 4, 0.0),
    ]
    strict = statistics.distributions(SampleFilter(), dataclasses.replace(settings, right_from=91.0))
    assert [solve_rate["name"] for solve_rate in strict["solve_rates"]] == ["none right"]
    assert [group["name"] for group in statistics.groups(SampleFilter(), settings)["groups"]] == [
        "sums:3",
        "words:3",
        "sums:3",
    ]


def test_names_of_prompts_are_read_as_they_are_written(tmp_path: Path) -> None:
    settings = dataclasses.replace(SETTINGS, set_names=("sums", "words"))
    for number, eval_name in ((3, ""), (prompt_number(1, 3), ""), (first_number("held_out") + 7, "held_out")):
        assert settings.prompt_number(settings.prompt_name(number, eval_name), eval_name) == number
        assert settings.prompt_number(str(3), eval_name) == 3
    for name, eval_name in (("others:3", ""), ("sums:x", ""), ("sums:", ""), ("-3", ""), ("sums:3", "held_out")):
        with pytest.raises(ValueError, match=r"whole number|no data set"):
            settings.prompt_number(name, eval_name)
    Store(tmp_path).train(prompt_number(1, 3), [0.0, 1.0, 0.0, 1.0], step=2)
    (tmp_path / "config.toml").write_text('[data]\nsets = [{name = "sums"}, {name = "words"}]\n')
    reader = RunReader(tmp_path)
    for name, total in (("words:3", 4), ("sums:3", 0), ("3", 0)):
        answer = reader.samples({"prompt": name}, 9)
        assert answer["total"] == total
        assert all(reader.sample(sample["id"])["name"] == name for sample in answer["samples"])


@pytest.mark.parametrize("rewards", [[-3.0, -1.0, -2.5, -1.0], [0.0, 100.0, 37.0, 100.0], [0.25] * 4, [0.0] * 4])
def test_rewards_of_any_range_are_in_a_histogram(tmp_path: Path, rewards: list[float]) -> None:
    Store(tmp_path).train(0, rewards)
    histogram = json.loads(to_json(distributions(tmp_path)))["reward"]
    assert sum(histogram["count"]) == 4
    assert histogram["edges"][0] <= min(rewards)
    assert histogram["edges"][-1] > max(rewards)
    assert len(histogram["edges"]) == len(histogram["count"]) + 1


def test_the_newest_samples_are_counted_if_there_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_statistics, "MAX_SAMPLES", 10)
    store = Store(tmp_path)
    for step in range(5):
        store.train(step, [0.0, 1.0, 0.0, 1.0], step=step)
    answer = SampleStatistics(tmp_path).groups(SampleFilter(), SETTINGS)
    assert (answer["total"], answer["from_step"]) == (2, 3)
    of = distributions(tmp_path)
    assert (of["samples"], of["steps"], of["from_step"]) == (8, [3, 4], 3)
    early = distributions(tmp_path, first_step=1, last_step=2)
    assert (early["samples"], early["steps"], early["from_step"]) == (8, [1, 2], None)


def test_numbers_are_read_again_when_the_store_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_statistics, "REUSED", 0.0)
    store = Store(tmp_path)
    store.train(0, [0.0, 1.0, 0.0, 1.0])
    statistics = SampleStatistics(tmp_path)
    assert statistics.groups(SampleFilter(), SETTINGS)["total"] == 1
    store.train(1, [0.0, 1.0, 0.0, 1.0], step=1)
    monkeypatch.setattr(sample_statistics, "REUSED", 1e9)
    assert statistics.groups(SampleFilter(), SETTINGS)["total"] == 2
    store.train(2, [0.0, 1.0, 0.0, 1.0], step=2)
    assert statistics.groups(SampleFilter(), SETTINGS)["total"] == 2, "what takes long to read is read less often"
    assert SampleStatistics(tmp_path).groups(SampleFilter(), SETTINGS)["total"] == 3


def test_settings_are_those_of_the_configuration(tmp_path: Path) -> None:
    assert SampleSettings.of_run(tmp_path) == SampleSettings()
    config = defaults("arithmetic")
    (tmp_path / "config.toml").write_text(to_toml(config))
    settings = SampleSettings.of_run(tmp_path)
    assert (settings.group_size, settings.right_from) == (config.group_size, config.eval.solved_reward)
    (tmp_path / "config.toml").write_text('group_size = "x"\neval = 3\n[data]\nsets = [{name = "a"}, {name = "b"}]\n')
    assert SampleSettings.of_run(tmp_path) == SampleSettings(set_names=("a", "b"))


# ---- real size

SIZES = (30_000, 64)
INSERT = (
    "INSERT INTO samples (step, run_attempt, flow, eval_name, epoch, prompt, member, attempt, reward, parts, finish, "
    "reason, version_min, version_max, spans, tokens, prompt_text, completion, ids, advantage, flagged) "
    "VALUES (?, 1, 'train', '', 0, ?, ?, 0, ?, '{}', ?, '', ?, ?, '[]', ?, 'prompt', ?, ?, ?, 0)"
)


@pytest.fixture(scope="module")
def large_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with groups of 64 and long texts, without its other files."""
    run_dir = tmp_path_factory.mktemp("large")
    count, size = SIZES
    create_sample_file(run_dir / SAMPLES)

    def rows() -> Iterator[tuple[Any, ...]]:
        for number in range(count):
            prompt, member = divmod(number, size)
            step = prompt // 4
            yield (
                *(step, prompt, member, float(number * 7919 % 13 < 4), "length" if number % 11 == 0 else "stop"),
                *(step, step + 1, number * 31 % 4096, "x" * 2000, struct.pack("<50i", *range(50)), 0.25),
            )

    with closing(sqlite3.connect(run_dir / SAMPLES)) as database, database:
        database.executemany(INSERT, rows())
    config = dataclasses.replace(defaults("arithmetic"), group_size=size)
    (run_dir / "config.toml").write_text(to_toml(config))
    return run_dir


def test_lists_and_statistics_do_not_read_the_texts(large_run: Path) -> None:
    """What they read is in an index, and only the rows of a page are read from the table."""
    statements: list[str] = []
    connect = sqlite3.connect

    class Traced(sqlite3.Connection):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.set_trace_callback(statements.append)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sqlite3, "connect", lambda *a, **o: connect(*a, **{**o, "factory": Traced}))
        reader = SampleReader(large_run)
        reader.columns(SampleFilter(first_step=3), 100_000)
        for order in ("newest", "worst", "random", *SORTED):
            reader.query(order=order, limit=2)
    scans = [
        statement
        for statement in statements
        if statement.startswith("SELECT") and "FROM samples WHERE +flow" in statement
    ]
    assert len(scans) > 2 * len(SORTED)
    with closing(connect(large_run / SAMPLES)) as database:
        for scan in scans:
            plan = " ".join(str(row[3]) for row in database.execute(f"EXPLAIN QUERY PLAN {scan}"))
            assert "COVERING INDEX sample_numbers" in plan, (scan, plan)


def test_answers_of_a_large_store_are_small(large_run: Path) -> None:
    reader, (count, size) = RunReader(large_run), SIZES
    answer = reader.groups({"order": "-spread"}, 50)
    assert answer["total"] == -(-count // size)
    assert len(to_json(answer)) < 40_000
    assert {group["size"] for group in answer["groups"]} <= {size, count % size}
    of = reader.distributions({})
    assert of["samples"] == count
    assert sum(of["tokens"]["count"]) == sum(of["reward"]["count"]) == count
    assert len(to_json(of)) < 10_000
    members = reader.samples({"group": str(answer["groups"][0]["id"]), "order": "-advantage"}, size)
    assert members["total"] == answer["groups"][0]["size"]


# ---- the guide and the command

GUIDE = (Path(__file__).parents[3] / "docs" / "guides" / "seeing.md").read_text()


def blocks(language: str) -> str:
    return "".join(re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL))


SAMPLES_COMMANDS = [line for line in blocks("sh").splitlines() if line.startswith("flowrt samples ")]


@pytest.fixture(scope="module")
def guide_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run RUN that has what the commands of the guide ask for."""
    directory = tmp_path_factory.mktemp("guide")
    run_dir = directory / "RUN"
    run_dir.mkdir()
    store = Store(run_dir)
    texts = (pack_text("a prompt"), pack_text("I cannot say"), struct.pack("<2i", 1, 2))
    for step in (0, 17, 99, 100, 120, 200):
        store.train(step, [0.0, 1.0, 0.5, 1.0], step=step, spans=(step, 210), data=texts)
    store.write(scored(300, 0, 0.0, is_single=True, reason="timeout: 10 s"), step=200)
    store.write(*(scored(9, member, 1.0, flow="eval", eval_name="held_out") for member in range(2)))
    config = dataclasses.replace(defaults("arithmetic"), group_size=GROUP)
    (run_dir / "config.toml").write_text(to_toml(config))
    return directory


def test_the_guide_names_every_way_to_count_samples() -> None:
    text = "\n".join(SAMPLES_COMMANDS)
    assert all(f"--by {by}" in text for by in get_args(By))


@pytest.mark.parametrize("command", SAMPLES_COMMANDS)
def test_commands_of_the_guide_print_something(
    guide_run: Path, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(guide_run)
    assert main(shlex.split(command, comments=True)[1:]) == 0
    printed = capsys.readouterr().out
    assert "samples" in printed or "groups" in printed
    assert "no samples" not in printed


def test_the_program_of_the_guide_prints_groups_and_solve_rates(
    guide_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(guide_run)
    [source] = [
        program for program in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL) if "SampleStatistics" in program
    ]
    exec(compile(source, "seeing.md", "exec"), {"__name__": "example"})
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["200 2 of 4 0.625", "120 2 of 4 0.625", "100 2 of 4 0.625", "25 to 50 % 6 0.625"]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    store = Store(tmp_path)
    for prompt in range(3):
        store.train(prompt, [0.0, 1.0, 0.5, 1.0], step=prompt)
    (tmp_path / "config.toml").write_text(to_toml(dataclasses.replace(defaults("arithmetic"), group_size=GROUP)))
    return tmp_path


def test_the_command_prints_groups_and_distributions(
    written: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")

    def output(*words: str) -> str:
        assert main(["samples", str(written), *words]) == 0
        return capsys.readouterr().out

    groups_of = output("--by", "group", "--newest", "2")
    assert "2 of 3 groups" in groups_of
    assert [line.split()[:5] for line in groups_of.splitlines()[-3:-1]] == [
        ["2", "2", "0.625", "0.4787", "2"],
        ["1", "1", "0.625", "0.4787", "2"],
    ]
    assert "4 (3 to 6)" not in groups_of
    assert "4.5 (3 to 6)" in groups_of
    assert "4 of 4" in output("--by", "group", "--right-from", "0")
    bins = [line.split()[:4] for line in output("--by", "reward").splitlines() if " to 0.05 " in line]
    assert bins == [["0", "to", "0.05", "3"]]
    assert "12 samples of steps 0 to 2" in output("--by", "length")
    assert "8 samples of steps 1 to 2" in output("--by", "data_set", "--steps", "1:2")
    assert "25 to 50 %" in output("--by", "solve_rate")
    assert set(get_args(By)) == {"group", "reward", "length", "data_set", "solve_rate"}


def test_a_narrow_terminal_shortens_the_prompts_of_groups_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    for prompt in range(3):
        store.train(
            prompt,
            [0.0, 1.0, 0.5, 1.0],
            step=prompt,
            data=(pack_text(f"{prompt} of several " * 20), pack_text("no"), b""),
        )
    (tmp_path / "config.toml").write_text(to_toml(dataclasses.replace(defaults("arithmetic"), group_size=GROUP)))
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["samples", str(tmp_path), "--by", "group", "--newest", "2"]) == 0
    output = capsys.readouterr().out
    assert [line.split()[:5] for line in output.splitlines() if "0.625" in line] == [
        ["2", "2", "0.625", "0.4787", "2"],
        ["1", "1", "0.625", "0.4787", "2"],
    ]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--by group --tokens", "takes --by without --tokens"),
        ("--by reward --jsonl out", "takes --by without --tokens, --jsonl and --parquet"),
        ("--right-from 1", "takes --right-from and --with-dropped together with --by"),
        ("--with-dropped", "takes --right-from and --with-dropped together with --by"),
        ("--by group --with-dropped", "lists dropped groups anyway"),
        ("--by length --worst 3", "--by length counts all samples"),
        ("--by median", "invalid choice: 'median'"),
        ("--by group --right-from nan", "'nan' is no finite number"),
        ("--by group --step 9", "no sample of step 9 is stored"),
    ],
)
def test_options_that_change_nothing_are_refused(
    written: Path, words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["samples", str(written), *words.split()]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert sentence in line


def test_bins_are_named_by_their_values() -> None:
    assert [bin_name([0.0, 1.0, 2.0], at) for at in range(2)] == ["0", "1"]
    assert bin_name([0.0, 50.0, 100.0], 1) == "50 to 99"
    assert bin_name([0.0, 0.5, 1.0], 0) == "0 to 0.5"
