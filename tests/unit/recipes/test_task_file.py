"""Tasks in user files: their recipes are found, and every mistake is reported in one sentence with its line."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from flowrt.errors import ConfigError
from flowrt.launcher.absolute_paths import with_absolute_paths
from flowrt.launcher.run_checks import with_checked_task
from flowrt.recipes.config import RunConfig
from flowrt.recipes.config_io import defaults, from_toml, parse, read, to_toml
from flowrt.recipes.tasks import arithmetic, custom, task_file, task_file_process
from flowrt.recipes.tasks.registry import task_of

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_task.py"
IMPORTS = "from flowrt.tasks import Example, Recipe, RunConfig, Task\n"


def write(path: Path, text: str) -> str:
    file = path / "mine.py"
    file.write_text(text)
    return str(file)


def edited(path: Path, *changes: tuple[str, str]) -> str:
    """The example with these changes."""
    text = EXAMPLE.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return write(path, text)


def file_line(file: str, text: str) -> int:
    """The first line with this text, from 1."""
    return next(number for number, line in enumerate(Path(file).read_text().splitlines(), 1) if text in line)


def checked(file: str, *flags: str) -> RunConfig:
    """The configuration after the checks before a run."""
    return with_checked_task(parse([file, *flags]), lambda _: None)


def test_the_example_is_one_short_file() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 40


@pytest.mark.slow
def test_a_copy_of_a_built_in_task_has_its_defaults_and_its_problems(tmp_path: Path) -> None:
    copy = tmp_path / "mine.py"
    shutil.copy(str(arithmetic.__file__), copy)
    config, usual = parse([str(copy), "--steps", "3"]), parse(["arithmetic", "--steps", "3"])
    assert config.recipe == f"{copy}:RECIPE"
    assert dataclasses.replace(config, recipe="arithmetic") == usual
    mine, built_in = task_of(config), task_of(usual)
    assert mine.training_problems() == built_in.training_problems()
    assert mine.tokenizer().to_str() == built_in.tokenizer().to_str()


@pytest.mark.slow
def test_a_copy_of_the_custom_recipe_accepts_its_flags(tmp_path: Path) -> None:
    copy = tmp_path / "mine.py"
    shutil.copy(str(custom.__file__), copy)
    flags = ["--data", "plus=a.jsonl", "--data", "minus=b.jsonl", "--reward", "exact", "--data.prefill", "True"]
    config = parse([str(copy), *flags])
    assert [set_.name for set_ in config.data.sets] == ["plus", "minus"]
    with pytest.raises(ConfigError, match=r"data\.prefill changes nothing"):
        parse([str(EXAMPLE), "--data.prefill", "True"])
    with pytest.raises(ConfigError, match=r"data\.sets changes nothing"):
        parse([str(EXAMPLE), *flags[:4]])


@pytest.mark.slow
def test_the_path_is_absolute_and_flags_and_files_override_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(EXAMPLE, tmp_path / "mine.py")
    monkeypatch.chdir(tmp_path)
    assert defaults("mine.py").recipe == f"{tmp_path}/mine.py:RECIPE"
    (tmp_path / "a.toml").write_text('recipe = "mine.py"\nsteps = 5\n')
    config = read(["--config", "a.toml", "--group-size", "3", "--algorithm", "dapo"], "flowrt run")
    assert (config.recipe, config.steps, config.group_size) == (f"{tmp_path}/mine.py:RECIPE", 5, 3)
    assert (config.algorithm.name, config.sft.stop_reward) == ("dapo", 0.6)
    assert read(["mine.py", "--config", "a.toml"], "flowrt run").steps == 5
    shutil.copy(EXAMPLE, tmp_path / "other.py")
    with pytest.raises(ConfigError, match=r"a.toml is for recipe 'mine.py', not 'other.py'"):
        read(["other.py", "--config", "a.toml"], "flowrt run")


@pytest.mark.slow
def test_a_saved_configuration_is_read_without_the_task_file(tmp_path: Path) -> None:
    file = edited(tmp_path)
    config = parse([file, "--steps", "7"])
    Path(file).unlink()
    assert from_toml(to_toml(config)) == config


@pytest.mark.slow
def test_a_file_with_several_recipes_needs_a_recipe_name(tmp_path: Path) -> None:
    file = edited(tmp_path, ("RECIPE =", "A ="))
    assert parse([file]).recipe == f"{file}:A"
    file = edited(tmp_path, ("RECIPE =", "B = Recipe('b', RunConfig(steps=9), Reversal)\nA ="))
    assert parse([f"{file}:B"]).steps == 9
    with pytest.raises(ConfigError, match=r"mine.py has several recipes, B, A; name one as .*mine.py:NAME"):
        parse([file])
    with pytest.raises(ConfigError, match=r"has no recipe C, .* \(there is: B, A\)"):
        parse([f"{file}:C"])


INVALID_FILES = {
    "nothing": ("x = 1\n", r"mine\.py has no recipe RECIPE, a flowrt\.tasks\.Recipe \(there is: none\)"),
    "syntax": ("x = 1\ndef (:\n", r"mine\.py:2: SyntaxError: .*, while the file was loaded; correct it"),
    "import": ("\nimport no_such_module\n", r"mine\.py:2: ModuleNotFoundError: "),
    "exit": ("import sys\nsys.exit(0)\n", r"mine\.py:2: it ended the program with exit\(0\)"),
    "no config": (f"{IMPORTS}RECIPE = Recipe('a', {{}}, len)\n", r"RECIPE\.defaults is dict, not RunConfig"),
    "no summary": (f"{IMPORTS}RECIPE = Recipe(1, RunConfig(), len)\n", r"RECIPE\.summary is int, not str"),
    "no task": (f"{IMPORTS}RECIPE = Recipe('a', RunConfig(), 3)\n", r"RECIPE\.task is int, and not a function"),
}
PROCESS_FAILURES = {
    "exits": ("import os\nos._exit(0)\n", r"mine\.py ended its process with code 0: without an answer"),
    "killed": (
        "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n",
        r"mine\.py:2 was killed by SIGSEGV: without an answer",
    ),
    "raises": ("\n\nraise ValueError('a')\n", r"mine\.py:3: ValueError: a, while the file was loaded; correct it"),
    "text": (f"{IMPORTS}RECIPE = Recipe('a', RunConfig(steps='9'), len)\n", r"mine\.py: 'steps' takes int, not str"),
    "table": (f"{IMPORTS}RECIPE = Recipe('a', RunConfig(data=3), len)\n", "'data' is a table of keys, not 3"),
    "bounds": (f"{IMPORTS}RECIPE = Recipe('a', RunConfig(steps=0), len)\n", "steps is 0; use a value above 0"),
}
"""Files that need a subprocess to be loaded safely, and values that its caller checks."""


@pytest.mark.parametrize("case", INVALID_FILES)
def test_a_file_without_a_task_is_refused_in_one_sentence(tmp_path: Path, case: str) -> None:
    text, expected = INVALID_FILES[case]
    with pytest.raises(ConfigError, match=expected) as refused:
        task_file_process.describe(write(tmp_path, text))
    assert "\n" not in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("case", PROCESS_FAILURES)
def test_a_file_that_ends_its_process_is_refused_in_one_sentence(tmp_path: Path, case: str) -> None:
    text, expected = PROCESS_FAILURES[case]
    with pytest.raises(ConfigError, match=expected) as refused:
        parse([write(tmp_path, text)])
    assert "\n" not in str(refused.value)


def test_invalid_task_file_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no task file .*/nowhere\.py; name a recipe, FILE\.py, or"):
        parse([f"{tmp_path}/nowhere.py"])
    with pytest.raises(ConfigError, match=r"there is no task file"):
        parse([f"{tmp_path}/nowhere.py:NAME"])
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(ConfigError, match=r"there is no task file .*/folder\.py"):
        parse([f"{tmp_path}/folder.py"])
    shutil.copy(EXAMPLE, tmp_path / "copy.py")
    with pytest.raises(ConfigError, match=r"copy\.py has the name of a module of Python, .*; rename it"):
        parse([f"{tmp_path}/copy.py"])
    with pytest.raises(ConfigError, match=r"there is no recipe 'mine\.txt' \(a task of your own is FILE\.py\)"):
        parse(["mine.txt"])


@pytest.mark.slow
def test_a_file_that_hangs_is_reported_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_file, "LOAD_S", 10.0)
    file = write(tmp_path, "import subprocess, time\nsubprocess.Popen(['sleep', '600'])\ntime.sleep(600)\n")
    with pytest.raises(ConfigError, match=r"mine\.py:3 did not return within 10 s; correct it"):
        parse([file])


INVALID_TASKS = {
    "no prompts": (("return self._training", "return []"), "training_problems gives no prompts"),
    "held out": (("return self._held_out", "return []"), "held_out_problems gives no prompts"),
    "overlap": (("return self._held_out", "return self._training[:5]"), "5 of 5 held-out prompts are"),
    "generator": (("return self._training", "return (one for one in [])"), "gives generator, not a sequence"),
    "no example": (("return self._training", "return ['a']"), "gives str at 0, no Example"),
    "number": (('Example(f"{word}=", word[::-1]', 'Example(f"{word}=", 7'), "answer 0 of training_problems is int"),
    "empty": (('Example(f"{word}="', 'Example(""'), "prompt 0 of training_problems is empty"),
    "random": (("Random(config.seed)", "Random()"), "gives other prompts when the task is made again"),
    "raises": (("/ len(answer)", "/ 0"), r"mine\.py:LINE: ZeroDivisionError: .*, in the reward of the response '"),
    "no number": (("/ len(answer)", "* float('nan')"), "the reward is nan, not a finite number, in the reward of"),
    "text": (("/ len(answer)", "and 'x'"), "the reward is 'x', not a finite number"),
    "tokenizer": (('character_tokenizer("abcdef=")', "3"), "tokenizer gives int, not a tokenizers.Tokenizer"),
    "sft": (("rng.choice(self._training)", "3  # type: ignore"), "sft_example gives int, no Example"),
    "init": (("Random(config.seed).shuffle(words)", "raise SystemExit(1)"), r"mine\.py:LINE: it ended the program"),
    "no class": (("    Reversal,\n", "    len,\n"), "TypeError|gives int, and no flowrt.tasks.Task"),
}


@pytest.mark.parametrize("case", INVALID_TASKS)
def test_an_invalid_task_is_refused_in_one_sentence(tmp_path: Path, case: str) -> None:
    change, expected = INVALID_TASKS[case]
    file = edited(tmp_path, change)
    line = file_line(file, change[1].partition("\n")[0])
    with pytest.raises(ConfigError, match=expected.replace("LINE", str(line))) as refused:
        task_file_process.check(dataclasses.replace(task_file.load(file)[1].defaults, recipe=f"{file}:RECIPE"))
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_a_task_that_hangs_is_refused_at_its_deadline(tmp_path: Path) -> None:
    file = edited(tmp_path, ("return self._training", "while True: pass"))
    line = file_line(file, "while True")
    with pytest.raises(ConfigError, match=rf"mine\.py:{line} did not return within 10 s; correct it"):
        checked(file, "--data.check-timeout-s", "10")


@pytest.mark.slow
def test_a_changed_task_file_is_refused_by_its_digest(tmp_path: Path) -> None:
    file = edited(tmp_path)
    config = checked(file)
    assert config.recipe_sha256 == task_file.digest(file)
    task_of(config)
    assert config.reward.functions == (f"task:{file}:RECIPE",)
    assert with_absolute_paths(config) == config
    with pytest.raises(ConfigError, match="has a reward of its own, and would not use exact"):
        parse([file, "--reward", "exact"])
    with pytest.raises(ConfigError, match="kind task is for a task in a file alone"):
        parse(["custom", "--reward", f"task:{file}:RECIPE"])
    edited(tmp_path, ('"abcdef="', '"abcdefg="'))
    with pytest.raises(ConfigError, match=r"has changed since the run began .* --recipe-sha256 [0-9a-f]{64}$"):
        task_of(config)
    with pytest.raises(ConfigError, match="has changed since the run began"):
        with_checked_task(config, lambda _: None)


@pytest.mark.slow
def test_a_task_without_an_embedded_model_requires_a_model(tmp_path: Path) -> None:
    text = EXAMPLE.read_text()
    file = write(tmp_path, text[: text.index("    def tokenizer")] + text[text.index("\n\nRECIPE") :])
    with pytest.raises(ConfigError, match="has no embedded model, and starts from a model of yours"):
        checked(file)


def test_task_file_keys_are_refused_for_built_in_recipes() -> None:
    for flag in (["--recipe-sha256", "ab"], ["--data.check-timeout-s", "5"]):
        with pytest.raises(ConfigError, match="changes nothing in recipe arithmetic"):
            parse(["arithmetic", *flag])
