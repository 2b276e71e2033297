"""Write the measured figures into the documents, each between its two markers, from the files in bench/results.

Run without arguments. The text is that of the templates in scripts/figures (Jinja), one for each document; a value is
written as ``{{ job.samples_per_s | f(".0f") }}``. A test compares the documents with what the templates give.
"""

import argparse
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import jinja2

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
TEMPLATES = ROOT / "scripts" / "figures"
BEGIN, END = "<!-- figures: scripts/figures.py -->\n", "<!-- end of figures -->"
PAGES = {
    "README.md": "readme.md",
    "docs/benchmarks.md": "benchmarks.md",
    "docs/objectives.md": "objectives.md",
    "docs/guides/models.md": "models.md",
}
"""The template of each document."""


def results() -> dict[str, dict[str, Any]]:
    """The contents of all results files, by name."""
    return {path.stem: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}


def row(measured: dict[str, float], figure: str, what: str, bound: str) -> str:
    """A row of a table: a figure, what it is, a bound such as "<= 5", the value, and whether it misses the bound."""
    if figure not in measured:
        return f"| `{figure}` | {what} | {bound} | not measured | |"
    value, (sense, limit) = measured[figure], bound.split()
    is_kept = value <= float(limit) if sense == "<=" else value >= float(limit)
    return f"| `{figure}` | {what} | {bound} | {value:.3g} | {'' if is_kept else 'missed'} |"


def refusals(families: dict[str, dict[str, str]]) -> dict[str, list[str]]:
    """The families that are refused altogether, by the reason without the family's own name and number."""
    by_reason: defaultdict[str, list[str]] = defaultdict(list)
    for name, result in families.items():
        if result["state"] == result["training"] == "refused":
            reason = result["reason"].removeprefix(f"model {name}").lstrip(": ").replace("|", "/")
            by_reason[re.sub(r"by [\d.e+-]+ nats", "by some nats", reason)].append(name)
    return dict(sorted(by_reason.items()))


def figures(page: str) -> str:
    """The figures of a document, as Markdown. Raises UndefinedError for a value that was not measured."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 (Markdown of this repository)
    )
    environment.filters["f"] = format
    template = environment.get_template(PAGES[page])
    return template.render(results=results(), row=row, refusals=refusals)


def rendered(text: str, figures: str) -> str:
    """The text of a page with new figures between its markers. Raises ValueError unless it begins them exactly once."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + figures + END + rest.split(END)[1]


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name in PAGES:
        page = ROOT / name
        page.write_text(rendered(page.read_text(), figures(name)))
