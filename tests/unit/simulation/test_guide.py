"""The examples of docs/guides/simulation.md run and print the output on the page."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "simulation.md"
EXAMPLES = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_page_has_two_examples() -> None:
    assert len(EXAMPLES) == 2


@pytest.mark.parametrize(("source", "output"), EXAMPLES, ids=["cluster", "dispatch"])
def test_example_prints_the_output_of_the_page(source: str, output: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(source, str(PAGE), "exec"), {"__name__": "example"})
    assert capsys.readouterr().out == output
