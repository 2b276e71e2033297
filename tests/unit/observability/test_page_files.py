"""The files of the page: no text is parsed as HTML, no inline styles, and the published uPlot."""

import hashlib
import itertools
import math
import re
from pathlib import Path

import pytest

import flowrt.observability.page
from flowrt.ids import FETCH, GATHER, RANKS, STOPPED

PAGE = Path(flowrt.observability.page.__file__).parent
PARSES_HTML = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|setHTML|srcdoc")
PAGES, SCRIPTS = ("page.html", "runs.html"), ("elements.js", "samples.js", "page.js", "runs.js")
UPLOT = {
    "uplot.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uplot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "LICENSE.uplot": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}
"""sha256 of dist/uPlot.iife.min.js, dist/uPlot.min.css and LICENSE of the package uplot 1.6.32."""


@pytest.mark.parametrize("name", [*PAGES, *SCRIPTS, "uplot.min.js"])
def test_no_text_is_parsed_as_html_or_run(name: str) -> None:
    assert PARSES_HTML.findall((PAGE / name).read_text()) == []


def test_page_has_no_inline_style_script_or_handler() -> None:
    for name in PAGES:
        assert re.findall(r"\sstyle=|\son\w+=|<style|<script>", (PAGE / name).read_text()) == []
    for name in SCRIPTS:
        assert not re.search(r"setAttribute\(.style|[{,]\s*style:", (PAGE / name).read_text())


def test_page_names_no_other_host() -> None:
    for name in (*PAGES, *SCRIPTS, "page.css"):
        assert re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", (PAGE / name).read_text()) == []


@pytest.mark.parametrize(("name", "digest"), UPLOT.items())
def test_uplot_is_unchanged(name: str, digest: str) -> None:
    assert hashlib.sha256((PAGE / name).read_bytes()).hexdigest() == digest


def test_page_of_a_run_is_small() -> None:
    names = ("page.html", "elements.js", "samples.js", "page.js", "page.css", *UPLOT)
    assert sum((PAGE / name).stat().st_size for name in names) < 180_000


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_each_kind_of_span_has_a_colour_of_its_own(scheme: int) -> None:
    sources = "".join(path.read_text() for path in PAGE.parents[1].rglob("*.py"))
    kinds = {*re.findall(r"\.busy\(\s*\"(\w+)\"", sources), FETCH, GATHER, RANKS, STOPPED}
    assert len(kinds) >= 14
    colours: dict[str, str] = {}
    for block in (PAGE / "page.css").read_text().split("@media (prefers-color-scheme: dark)")[: scheme + 1]:
        colours |= dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))
    assert kinds <= colours.keys()
    near = [
        (first, second)
        for first, second in itertools.combinations(sorted(kinds), 2)
        if math.dist(lab(colours[first]), lab(colours[second])) < 12
    ]
    assert near == []


def lab(colour: str) -> tuple[float, float, float]:
    """CIELAB coordinates of a colour #rrggbb; a distance of 2 can be seen, one of 12 is clear in thin bars."""
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [
        channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4 for channel in (red, green, blue)
    ]
    rows = ((0.4339, 0.3762, 0.1899), (0.2126, 0.7152, 0.0722), (0.0177, 0.1095, 0.8728))  # XYZ over that of white
    xyz = [sum(weight * channel for weight, channel in zip(row, linear, strict=True)) for row in rows]
    x, y, z = (coordinate ** (1 / 3) if coordinate > 0.008856 else 7.787 * coordinate + 16 / 116 for coordinate in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)
