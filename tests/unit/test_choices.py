"""What a flag chooses is the value that it stands for: refresh policies, one's own reward."""

from pathlib import Path

import pytest
from flowrt.workers.engines import train_engine

from flowrt.controller.refresh import DelayedUpdate, Divergence, EveryN, Rolling
from flowrt.errors import ConfigError
from flowrt.recipes.grpo import policies
from flowrt.recipes.load import parse
from flowrt.recipes.own import load_reward
from flowrt.recipes.subjects import subject


def test_what_is_not_ones_own_takes_no_reward_and_what_is_needs_one(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "1+1?", "answer": "2"}\n')
    with pytest.raises(ConfigError, match="flowrt run own"):
        parse(["gsm8k", "--data", str(data), "--data.reward", "mine.py"])
    with pytest.raises(ConfigError, match=r"data\.reward FILE\.py:FUNCTION"):
        subject(parse(["own", "--data", str(data)]))


@pytest.mark.parametrize(
    ("flags", "refresh"),
    [
        ([], DelayedUpdate()),
        (["--rollout.refresh.policy", "rolling", "--rollout.refresh.at-once", "3"], Rolling(3)),
        (["--rollout.refresh.policy", "every", "--rollout.refresh.versions", "4"], EveryN(4)),
        (["--rollout.refresh.policy", "divergence", "--rollout.refresh.max-age", "5"], Divergence(1e-3, 5)),
    ],
)
def test_the_refresh_policy_is_the_one_that_was_named(flags: list[str], refresh: object) -> None:
    assert policies(parse(flags)).refresh == refresh


def test_a_refresh_that_cannot_be_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="max_age is 0"):
        parse(["--rollout.refresh.policy", "divergence", "--rollout.refresh.max-age", "0"])


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("missing.py", None, "there is no file"),
        ("mine.txt", "", "no Python file"),
        ("mine.py", "import nothing_of_that_name", "cannot be imported .ModuleNotFoundError"),
        ("mine.py", "x = 1", "no function 'reward'"),
        ("mine.py:other", "def reward(response, answer): return 1", "no function 'other'"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_told_in_a_sentence(
    tmp_path: Path, name: str, text: str | None, said: str
) -> None:
    if text is not None:
        (tmp_path / name.partition(":")[0]).write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_reward(str(tmp_path / name))


@pytest.mark.parametrize(("started", "configured"), [(2, 1), (1, 2), (3, 2)])
def test_another_number_of_ranks_than_configured_is_refused(
    monkeypatch: pytest.MonkeyPatch, started: int, configured: int
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(started))
    config = parse(["--trainer.ranks", str(configured)])
    with pytest.raises(
        ConfigError, match=f"{started} trainer processes were started, but trainer.ranks is {configured}"
    ):
        train_engine(config)
