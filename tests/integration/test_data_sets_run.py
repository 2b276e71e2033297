"""Two weighted data sets in a killed and resumed run: each prompt is trained at its place in the seeded order."""

import json
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from flowrt.cli import main
from flowrt.controller.storage.ledger_reader import LedgerReader
from flowrt.ids import prompt_number
from flowrt.recipes.data.mixture import SetSize, mixture

STEPS, PROMPTS, EVERY, HELD_OUT, SEED = 16, 4, 3, 4, 3
ROWS = {"sevens": (17, 0.7), "nines": (5, 0.3)}
TRAINING_ROWS = {"sevens": 14, "nines": 4}
"""Training rows: without 3 and 1 held-out ones."""
REWARD = """
def reward(response, answer, source):
    assert answer == {"sevens": "7", "nines": "9"}[source], (answer, source)
    return (source == "nines") + response.count(answer) / 8
"""

pytestmark = pytest.mark.slow


@pytest.fixture
def flags(tmp_path: Path, untrained_model: Path) -> list[str]:
    words = []
    for name, (rows, weight) in ROWS.items():
        path = tmp_path / f"{name}.jsonl"
        digit = {"sevens": "7", "nines": "9"}[name]
        lines = [{"prompt": f"{name[0]}{n}=", "gold": {"is": digit}, "source": name} for n in range(rows)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        words += ["--data", f"{name}={path}:{weight}"]
    reward = tmp_path / "mine.py"
    reward.write_text(REWARD)
    return [
        *("--recipe", "custom", *words, "--data.answer-key", "gold.is", "--model", str(untrained_model)),
        *("--reward", str(reward), "--data.eval-prompts", str(HELD_OUT), "--seed", str(SEED)),
        *("--prompts-per-step", str(PROMPTS), "--group-size", "2", "--rollout.max-new-tokens", "6"),
        *("--rollout.workers", "1", "--algorithm.kl.coef", "0", "--max-staleness", "0"),
        *("--steps", str(STEPS), "--checkpoint.every", str(EVERY)),
    ]


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


@pytest.mark.long
def test_killed_and_resumed_run_of_two_data_sets_trains_in_the_seeded_order(
    launch: Callable[..., Any], flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = launch(*flags)
    killed.wait_for(lambda: len(metrics(killed.run_dir)) >= 2 * EVERY + 2, "steps", 120.0)
    killed.kill_all()
    run_dir = killed.run_dir
    with (tmp_path / "mine.py").open("a") as reward:
        reward.write("# changed\n")
    resumed = launch(resume=run_dir)
    assert resumed.wait(180.0) == 0, resumed.output
    has_changed = f"{tmp_path / 'mine.py'} is not the file of the start of the run"
    assert has_changed in resumed.words
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events if has_changed in event["text"]] == ["warning"]
    assert "jsonl is not the file of the start" not in resumed.words

    sizes = [SetSize(name, weight, TRAINING_ROWS[name]) for name, (_, weight) in ROWS.items()]
    order = list(islice(mixture(sizes, SEED, 0, lambda place: place), STEPS * PROMPTS))
    expected = [
        sorted((place.epoch, prompt_number(place.data_set, place.row)) for place in order[step * PROMPTS :][:PROMPTS])
        for step in range(STEPS)
    ]
    with LedgerReader(run_dir / "ledger.sqlite") as ledger:
        trained = ledger.query("SELECT step, epoch, prompt FROM prompts WHERE state = 'trained'")
    actual = [sorted((epoch, prompt) for at, epoch, prompt in trained if at == step) for step in range(STEPS)]
    assert actual == expected
    assert max(place.epoch for place in order if place.data_set == 1) >= 3  # the small set was repeated
    assert max(place.epoch for place in order if place.data_set == 0) >= 2
    assert len(set(trained)) == len(trained) == STEPS * PROMPTS
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["prompts_lost"] == summary["prompts_trained_twice"] == 0
    assert summary["resumed_from"] >= EVERY

    lines = metrics(run_dir)
    assert [line["step"] for line in lines] == list(range(STEPS))
    for step, line in enumerate(lines):
        counts = Counter(place.data_set for place in order[step * PROMPTS :][:PROMPTS])
        assert [line[f"groups_of/{name}"] for name in ROWS] == [counts[0], counts[1]]
        means = [line.get(f"reward_of/{name}", 0.0) for name in ROWS]
        mixed = sum(counts[at] * mean for at, mean in enumerate(means)) / PROMPTS
        assert line["reward"] == pytest.approx(mixed, abs=1e-5)
        assert means[0] < 1
        assert not counts[1] or means[1] >= 1

    assert main(["ledger", str(run_dir)]) == 0
    output = capsys.readouterr().out
    assert "sevens" in output
    assert "nines" in output
    first = order[0]
    name = list(ROWS)[first.data_set]
    assert main(["ledger", str(run_dir), "--prompt", f"{name}:{first.row}"]) == 0
    assert f"prompt {name}:{first.row}: trained in epoch 0" in capsys.readouterr().out
    assert main(["ledger", str(run_dir), "--prompt", "eights:1"]) == 2
    assert "the run has no data set 'eights'; it has sevens, nines" in capsys.readouterr().err


def test_as_is_order_is_kept_and_changed_data_sets_are_refused_on_resume(
    launch: Callable[..., Any], flags: list[str], tmp_path: Path
) -> None:
    run = launch(*flags, "--steps", "2", "--data.order", "as_is")
    assert run.wait(120.0) == 0, run.output
    with LedgerReader(run.run_dir / "ledger.sqlite") as ledger:
        trained = ledger.query("SELECT epoch, prompt FROM prompts WHERE state = 'trained' ORDER BY epoch, prompt")
    sizes = [SetSize(name, weight, TRAINING_ROWS[name]) for name, (_, weight) in ROWS.items()]
    order = list(islice(mixture(sizes, None, 0, lambda place: place), 2 * PROMPTS))
    assert trained == sorted((place.epoch, prompt_number(place.data_set, place.row)) for place in order)
    assert {place.row for place in order if place.data_set == 0} == set(
        range(sum(place.data_set == 0 for place in order))
    )
    resumed = launch("--data", f"sevens={tmp_path / 'sevens.jsonl'}:1", resume=run.run_dir)
    assert resumed.wait(60.0) == 2
    assert "data.sets is sevens=" in resumed.words
    assert "stays that when the run is resumed" in resumed.words
