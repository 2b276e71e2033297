"""docs/reference/metrics.md lists every metric of a run, and no others."""

import dataclasses
import re
from functools import cache
from pathlib import Path

import pytest

from flowrt.controller.storage.run_metrics import RESERVED_FIELDS
from flowrt.controller.transitions.step_metrics import OF_SAMPLES
from flowrt.observability.exporters.exported_names import STEP, exported_name, prometheus_name
from flowrt.recipes.algorithm_config import FilterConfig
from flowrt.recipes.algorithms import PRESETS
from flowrt.recipes.config import SolveRateCurriculum
from flowrt.recipes.config_io import defaults
from flowrt.recipes.data_config import DataSetConfig
from flowrt.recipes.metric_names import CLOCK, OF_LOSS, metric_names
from flowrt.rewards.options import RewardOptions
from flowrt.runtime.run_lines import NONFINITE
from tests.unit.recipes.test_algorithms import run_config

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"


def documented() -> list[str]:
    """The fields of the first table of the page."""
    section = PAGE.read_text().partition("## metrics.jsonl")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*`) \|", section, re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def pattern(name: str) -> re.Pattern[str]:
    """A regular expression for a field: NAME, PART, RESULT and METRIC stand for user-defined names."""
    text = re.escape(name).replace("…", ".+")
    return re.compile(re.sub(r"NAME|PART|RESULT|METRIC", "[^/]+", text))


@cache
def names() -> frozenset[str]:
    known = {*CLOCK, *RESERVED_FIELDS, *OF_SAMPLES, NONFINITE, *(name for of in OF_LOSS.values() for name in of)}
    for preset in PRESETS.values():
        known |= metric_names(run_config(preset))
    plain = defaults("arithmetic")
    entropy = dataclasses.replace(plain.algorithm.entropy, coef=0.01, top_share=0.2)
    algorithm = dataclasses.replace(
        plain.algorithm,
        entropy=entropy,
        filter=FilterConfig(zero_variance=True, function="filter.py:keep"),
        kl=dataclasses.replace(plain.algorithm.kl, coef=0.1, target=0.1),
    )
    known |= metric_names(
        dataclasses.replace(
            plain,
            max_staleness=9,
            algorithm=algorithm,
            curriculum=SolveRateCurriculum(),
            rollout=dataclasses.replace(plain.rollout, top_k=5),
            reward=RewardOptions(functions=("exact", "length:9")),
            data=dataclasses.replace(plain.data, sets=(DataSetConfig("a", "a"), DataSetConfig("b", "b"))),
        )
    )
    return frozenset(known)


def names_table() -> str:
    """The table of the names in other tools, made from the code."""
    rows = [
        f"| `{name}` | `{exported_name(name)}` | `{prometheus_name(exported_name(name))}` |"
        for name in documented()
        if name not in (STEP, NONFINITE) and "…" not in name
    ]
    head = ("| metrics.jsonl | W&B, TensorBoard, Perfetto | Prometheus |", "|---|---|---|")
    return "".join(f"{row}\n" for row in (*head, *rows))


def test_the_names_in_other_tools_are_those_of_the_code() -> None:
    section = PAGE.read_text().partition("## Names in other tools")[2].partition("\n## ")[0]
    assert names_table() in section, f"the table is out of date; it is\n{names_table()}"


@pytest.mark.slow
def test_every_metric_is_on_the_page() -> None:
    patterns = [pattern(name) for name in documented()]
    divergences = re.compile(r"divergence_\d")
    missing = [
        name
        for name in names()
        if not divergences.fullmatch(name) and not any(documented_name.fullmatch(name) for documented_name in patterns)
    ]
    assert not missing


def test_every_documented_metric_exists() -> None:
    more = {"reference_version", "divergence_7", "second_moment_masked", "rejected", "clipped_dual"}
    plain = [name for name in documented() if re.fullmatch(r"[a-z_0-9]+", name)]
    assert len(plain) > 40
    assert [name for name in plain if name not in names() | more] == []
