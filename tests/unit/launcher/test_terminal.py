"""Output of commands: plain text in any encoding, whose reader may close it at any time."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from flowrt.cli import COMMANDS, main
from flowrt.errors import ConfigError
from flowrt.launcher.observer import locate
from flowrt.launcher.terminal import PlainConsole, printable
from flowrt.launcher.views.live import LiveView, summary_table
from flowrt.launcher.views.status import draw
from flowrt.recipes.config import RunConfig
from flowrt.recipes.config_io import RECIPE_NAMES, defaults, from_file, parse, to_toml
from flowrt.recipes.resume_overrides import FREE, apply_overrides

FLOWRT = str(Path(sys.executable).with_name("flowrt"))
HOSTILE = "x\x1b[31m[red]\u202e\udcff\n:smile:[/]"
SHOWN = "x\\x1b[31m[red]\\u202e\\xff :smile:[/]"


@given(st.text())
def test_printable_text_has_no_control_character_and_is_otherwise_unchanged(text: str) -> None:
    shown = printable(text, one_line=True)
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 or 0xD800 <= ord(c) < 0xE000 for c in shown)
    assert shown == printable(shown, one_line=True)
    assert printable(text) == text or not text.isprintable()


def test_printed_text_is_not_parsed_as_markup() -> None:
    out = io.StringIO()
    table = Table("h[red]", title="t[/x]")
    table.add_row("c[/y]")
    console = PlainConsole(file=out, width=60)
    console.print("p[/z] :smile:")
    console.print(table)
    for text in ("p[/z] :smile:", "h[red]", "t[/x]", "c[/y]"):
        assert text in out.getvalue()


def test_control_characters_in_worker_names_are_escaped() -> None:
    waits = {"who": HOSTILE, "what": HOSTILE, "age_s": 1.0, "limit_s": None, "blocked_on": HOSTILE}
    graph = {
        "deadlocks": [],
        "waits": [{**waits, "unsatisfiable": False, "overdue": False}],
        "workers": [[HOSTILE, HOSTILE, "idle", 0.1, HOSTILE]],
        "more": 0,
        "others": 0,
    }
    status = {
        "step": 1,
        "steps": 2,
        "live_groups": 0,
        "cut_off": {HOSTILE: 6.0},
        "vacancies": {HOSTILE: [2.0, HOSTILE]},
        "guards": {"firing": [HOSTILE], "log": [[1, HOSTILE]]},
        "graph": graph,
        "latest": {},
    }
    live = {**status, "workers": {HOSTILE: HOSTILE}, "waits": [[HOSTILE, HOSTILE, 1.0]], "ended": None}
    out = io.StringIO()
    PlainConsole(file=out, width=400).print(draw(status))
    assert out.getvalue().count(SHOWN) >= 6
    drawn = io.StringIO()
    with LiveView(PlainConsole(file=drawn, width=400, force_terminal=True, color_system=None)) as view:
        view.show(live)
    assert SHOWN in drawn.getvalue()
    assert "\x1b[31m" not in out.getvalue() + drawn.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["stdout", "stderr"])
def test_a_broken_pipe_does_not_change_the_exit_code(where: str) -> None:
    arguments, code = (["--help"], 0) if where == "stdout" else (["run", "--steps", "0"], 2)
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run(
        [FLOWRT, *arguments],
        stdout=write if where == "stdout" else subprocess.PIPE,
        stderr=write if where == "stderr" else subprocess.PIPE,
        timeout=600,
    )
    os.close(write)
    assert result.returncode == code
    assert not result.stdout
    assert not result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_do_not_change_the_exit_code(closed: str, tmp_path: Path) -> None:
    for arguments, code in (("--help", 0), ("run --steps 0", 2)):
        result = subprocess.run(
            ["sh", "-c", f"{FLOWRT} {arguments} {closed}"], cwd=tmp_path, capture_output=True, timeout=600
        )
        assert result.returncode == code
        assert b"Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())


def test_tables_are_printed_to_an_ascii_terminal(tmp_path: Path) -> None:
    code = (
        "import json, sys; from flowrt.launcher.views.live import summary_table; "
        "from flowrt.launcher.terminal import *; from flowrt.runtime.standard_streams import prepare_streams; "
        "prepare_streams(); console().print(summary_table(json.loads(sys.argv[1]))); console().print(sys.argv[2])"
    )
    summary = (
        '{"recipe": "custom", "seed": 0, "steps": 30, "wall_s": 1, "reward_window": 10, "reward_first": 0,'
        '"reward_last": 1,'
        '"eval_first": 0, "eval_last": 1, "samples": 1, "samples_per_s": 1, "tokens_per_s": 1, "staleness_mean": 0,'
        '"staleness_max": 0, "staleness_bound": 1, "prompts_lost": 0, "prompts_trained_twice": 0, "busy_fraction": {}}'
    )
    result = subprocess.run(
        [sys.executable, "-c", code, summary, b"caf\xc3\xa9"],
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    assert b"0.000 ? 1.000" in result.stdout
    assert b"caf\\xc3\\xa9" in result.stdout


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("flowrt 0.")


def test_help_names_every_command_and_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    overview = capsys.readouterr().out
    with pytest.raises(SystemExit) as raised:
        main(["--help"])
    assert raised.value.code == 0
    assert capsys.readouterr().out == overview
    for name in (*COMMANDS, *RECIPE_NAMES):
        assert re.search(rf"^ +{name}  +\w", overview, re.MULTILINE), name


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    if command == "worker":
        assert main([command, "--help"]) == 0
    else:
        with pytest.raises(SystemExit) as raised:
            main([command, "--help"])
        assert raised.value.code == 0
    assert f"flowrt {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["status", "a", "b"], "flowrt status takes no 'b'"),
        (["status", "a", "--stops"], "flowrt status takes no '--stops'"),
        (["status", "a", "--dead", "3"], "flowrt status takes no '--dead'"),
        (["status"], "flowrt status takes one RUN"),
        (["status", "a", "--run", "b"], "flowrt status takes one RUN"),
        (["drain", "w"], "--run --controller is required"),
        (["drain", "w", "--run", "a", "--controller", "b"], "not allowed with"),
        (["keys"], "required: DIR"),
        (["ledger"], "required: RUN"),
        (["worker"], "flowrt worker takes a role, not ''; there is: reference, reward, rollout, source, trainer"),
        (["worker", "judge"], "flowrt worker takes a role, not 'judge'"),
        (["--versions"], "flowrt takes no '--versions'"),
        (["status", "a", "a\nb"], "flowrt status takes no"),
    ],
)
def test_unknown_arguments_are_refused_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


def test_flowrt_config_writes_a_configuration_without_a_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["custom", "--data", "rows.jsonl", "--reward", "mine.py:score", "--steps", "3"]
    assert main(["config", *arguments]) == 0
    text = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    path = tmp_path / "job.toml"
    path.write_text(text)
    written = parse(["--config", str(path)])
    assert (written.recipe, written.steps) == ("custom", 3)
    assert written.data.path == str(tmp_path / "rows.jsonl")
    assert written.reward.functions == (str(tmp_path / "mine.py:score"),)
    assert from_file(path).run_dir == str(tmp_path)


def test_resume_help_lists_only_the_settings_that_may_change(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        apply_overrides(defaults("arithmetic"), ["--help", "all"])
    assert raised.value.code == 0
    shown = capsys.readouterr().out
    names = {flag.replace("-", "_") for flag in re.findall(r"[ \n]--([a-z][\w.-]*)", shown)}
    assert {"steps", "trainer.ranks", "rollout.workers", "controller.no_progress_timeout_s", "launch.rollout"} <= names
    kept = {name for name in names if name not in ("help", "tp", "mem_fraction_static")}
    assert all(
        name in FREE or name.partition(".")[0] in FREE or name.startswith(("rollout.sglang", "rollout.vllm"))
        for name in kept
    ), kept
    assert "Number of optimiser steps" in shown


def test_a_run_is_located_by_its_directory_or_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "mine"
    run_dir.mkdir()
    (run_dir / "address").write_text("tcp://127.0.0.1:5\n")
    monkeypatch.chdir(tmp_path)
    assert locate("mine") == ("tcp://127.0.0.1:5", Path("mine"))
    assert locate(str(run_dir)) == ("tcp://127.0.0.1:5", run_dir)
    assert locate("tcp://h:1") == ("tcp://h:1", None)
    with pytest.raises(ConfigError, match=r"tcp://HOST:PORT"):
        locate("nothing")


@pytest.mark.parametrize(("steps", "label"), [(2, "last step"), (8, "last 4 steps"), (30, "last 10 steps")])
def test_the_summary_names_its_reward_window(steps: int, label: str) -> None:
    summary: dict[str, Any] = {
        **dict.fromkeys(("wall_s", "reward_first", "reward_last", "samples_per_s", "tokens_per_s"), 0.0),
        **dict.fromkeys(("seed", "samples", "staleness_mean", "staleness_max", "staleness_bound"), 0),
        **dict.fromkeys(("eval_first", "eval_last")),
        "recipe": "custom",
        "prompts_lost": 0,
        "prompts_trained_twice": 0,
        "busy_fraction": {},
        "steps": steps,
        "reward_window": max(min(10, steps // 2), 1),
    }
    out = io.StringIO()
    PlainConsole(file=out, width=100).print(summary_table(summary))
    assert f"reward, first to {label} " in out.getvalue()


def test_a_configuration_round_trips_through_its_file(tmp_path: Path) -> None:
    config: RunConfig = defaults("custom")
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert from_file(tmp_path / "config.toml").run_dir == str(tmp_path)


@pytest.mark.parametrize("value", ["inf", "nan", "0", "-1", "1e308", "x"])
@pytest.mark.parametrize(
    "arguments",
    [["status", "run", "--deadline-s"], ["drain", "w", "--run", "run", "--within-s"], ["doctor", "--deadline-s"]],
)
def test_invalid_timeouts_are_refused(arguments: list[str], value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, value]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert arguments[-1] in line


@pytest.mark.parametrize("content", [b"\xa5\x00", b"", b"tcp://x", b"[red]", b"\x1b[31m"])
def test_a_damaged_address_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "address").write_bytes(content)
    with pytest.raises(ConfigError, match=r"/address (holds no address|cannot be read)"):
        locate(str(tmp_path))


def test_a_damaged_configuration_of_a_run_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "address").write_text("tcp://127.0.0.1:5")
    (tmp_path / "config.toml").write_bytes(b"\xff")
    assert main(["status", str(tmp_path)]) == 2
    assert "config.toml is not TOML" in capfd.readouterr().err
