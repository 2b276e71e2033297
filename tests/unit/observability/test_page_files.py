"""The files of the page: no text is parsed as HTML, no inline styles, and the published uPlot."""

import hashlib
import re
from pathlib import Path

import pytest

import flowrt.observability.page

PAGE = Path(flowrt.observability.page.__file__).parent
PARSES_HTML = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|setHTML|srcdoc")
UPLOT = {
    "uplot.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uplot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "LICENSE.uplot": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}
"""sha256 of dist/uPlot.iife.min.js, dist/uPlot.min.css and LICENSE of the package uplot 1.6.32."""


@pytest.mark.parametrize("name", ["page.html", "page.js", "uplot.min.js"])
def test_no_text_is_parsed_as_html_or_run(name: str) -> None:
    assert PARSES_HTML.findall((PAGE / name).read_text()) == []


def test_page_has_no_inline_style_script_or_handler() -> None:
    text = (PAGE / "page.html").read_text()
    assert re.findall(r"\sstyle=|\son\w+=|<style|<script>", text) == []
    assert not re.search(r"setAttribute\(.style|[{,]\s*style:", (PAGE / "page.js").read_text())


def test_page_names_no_other_host() -> None:
    for name in ("page.html", "page.js", "page.css"):
        assert re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", (PAGE / name).read_text()) == []


@pytest.mark.parametrize(("name", "digest"), UPLOT.items())
def test_uplot_is_unchanged(name: str, digest: str) -> None:
    assert hashlib.sha256((PAGE / name).read_bytes()).hexdigest() == digest


def test_page_is_small() -> None:
    assert sum((PAGE / name).stat().st_size for name in ("page.html", "page.js", "page.css", *UPLOT)) < 150_000
