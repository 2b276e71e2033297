"""run.html: the page of a run with its data in one file, which needs no server and fetches nothing.

    python -m flowrt.observability.page.single_file RUN [FILE]

The data are the answers of the page's API by path, as JSON, gzipped and in base64, so no text of a run can end the
script element. A content security policy allows the page's own scripts and styles by their hashes, and no requests.
"""

import argparse
import base64
import gzip
import hashlib
import html
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from flowrt.errors import EXIT_FAILED, EXIT_OK, FlowError
from flowrt.observability.compared_runs import ComparedRuns
from flowrt.observability.json_text import to_json
from flowrt.observability.run_reader import RunReader
from flowrt.observability.series import KEPT_POINTS
from flowrt.runtime.files import atomic_write

NAME = "run.html"
MAX_BYTES = 4 << 20
EDGE_S = 60.0
"""Length in seconds of the first and of the last window of lanes, in addition to the lanes of the whole run."""
SAMPLES = (("worst", 50), ("best", 50), ("newest", 70), ("random", 30))
"""Number of samples in each order; 200 in total."""
GROUPS = (("newest", 100, 8), ("worst", 50, 8), ("best", 50, 0))
"""Number of groups in each order, and of those whose samples are included."""
GROUP_SAMPLES = 64
"""Maximum number of samples of a group."""
OPENED = 24
"""Number of the worst and of the newest samples that are included with their tokens."""
SHARES = "api/attribution?from=0"
COMPARED = "api/compared"
PAGE = "page.html"
DATA_TYPE = "application/octet-stream"
Answers = dict[str, Any]
Answer = TypeVar("Answer")
_STYLE = re.compile(r'<link rel="stylesheet" href="([\w.]+)">')
_AHEAD = re.compile(r'<link rel="preload"[^>]*>\n')
"""Links of the page that preload answers of its server; a single file contains the answers."""
_SCRIPT = re.compile(r'<script src="([\w.]+)"></script>')
_HERE = Path(__file__).parent


def write(run_dir: Path, path: Path | None = None, others: Sequence[Path] = ()) -> Path:
    """Write the page of a run to a file; returns its path.

    Args:
        run_dir: directory of the run, in any state.
        path: the file; None: run.html in the run directory.
        others: directories of runs whose curves are drawn too.

    Raises ConfigError if a directory is not that of a run or cannot be compared, FlowError as `page`, and OSError if
    the file cannot be written.
    """
    path = path or run_dir / NAME
    atomic_write(path, page(answers(RunReader(run_dir), ComparedRuns(run_dir, others))))
    return path


def answers(reader: RunReader, compared: ComparedRuns | None = None) -> Answers:
    """The answers that the page requests, by path; that of a file that cannot be read is empty."""
    reader.read_attribution()
    content: Answers = {
        "api/run": reader.run(),
        "api/series?from=0": reader.series(),
        SHARES: reader.attribution(),
        "api/events?from=0": reader.events(),
        "api/ledger": _try(reader.ledger, {"states": {}, "dropped": {}}),
        "api/logs": reader.logs(),
    }
    whole = reader.timeline()
    first_s, last_s = whole["first_s"], whole["last_s"]
    content["api/timeline?t0=all"] = whole
    if last_s - first_s > EDGE_S:
        content["api/timeline?t0=first"] = reader.timeline(first_s, first_s + EDGE_S)
        content["api/timeline?t0=last"] = reader.timeline(last_s - EDGE_S, last_s)
    opened: dict[int, None] = {}
    for order, count in SAMPLES:
        page_of: Answers = _try(lambda: reader.samples({"order": order}, count), {"samples": [], "total": 0})  # noqa: B023
        content[f"api/samples?order={order}"] = page_of
        if order in ("worst", "newest"):
            opened |= dict.fromkeys(sample["id"] for sample in page_of["samples"][:OPENED])
    whole_groups: dict[int, None] = {}
    for order, count, included in GROUPS:
        groups: Answers = _try(lambda: reader.groups({"order": order}, count), {"groups": [], "total": 0})  # noqa: B023
        content[f"api/groups?order={order}"] = groups
        whole_groups |= dict.fromkeys(group["id"] for group in groups["groups"][:included])
    for number in whole_groups:
        asked = {"group": str(number), "order": "member"}
        content[f"api/samples?group={number}"] = _try(
            lambda: reader.samples(asked, GROUP_SAMPLES),  # noqa: B023
            {"samples": [], "total": 0},
        )
    if (distributions := _try(lambda: reader.distributions({}), None)) is not None:
        content["api/distributions"] = distributions
    for number in opened:
        content[f"api/sample/{number}"] = _try(lambda: reader.sample(number), None)  # noqa: B023
    # Again, because all files have been read: the answer names those that are damaged.
    content["api/run"] = reader.run()
    if compared is not None and compared.names:
        content["api/run"]["compared"] = list(compared.names)
        content[COMPARED] = compared.series("step", 0, math.inf, KEPT_POINTS)
        content["api/differences"] = compared.differences()
    return content


def _try(call: Callable[[], Answer], otherwise: Answer) -> Answer:
    """The result of a call; ``otherwise`` if a file cannot be read, which `RunReader.run` reports."""
    try:
        return call()
    except (FlowError, OSError, ValueError):
        return otherwise


def _without(content: Answers, *beginnings: str) -> None:
    for path in [path for path in content if path.startswith(beginnings)]:
        del content[path]


def _shorten(content: Answers, path: str, field: str, keep: int) -> None:
    content[path] = {**content[path], field: content[path][field][-keep:]}


LEFT_OUT: tuple[tuple[str, Callable[[Answers], None]], ...] = (
    ("the tokens of its samples", lambda content: _without(content, "api/sample/")),
    ("the samples of its groups", lambda content: _without(content, "api/samples?group=")),
    (
        "its best and random samples",
        lambda content: _without(content, "api/samples?order=best", "api/samples?order=random"),
    ),
    (
        "the lanes of its first and last minute",
        lambda content: _without(content, "api/timeline?t0=first", "api/timeline?t0=last"),
    ),
    ("its samples", lambda content: _without(content, "api/samples", "api/groups")),
    ("its lanes", lambda content: _without(content, "api/timeline")),
    ("the curves of other runs", lambda content: _without(content, COMPARED)),
    ("its logs", lambda content: _without(content, "api/logs")),
    ("all but the last 500 events", lambda content: _shorten(content, "api/events?from=0", "events", 500)),
    ("where the time went, but for the last 50 steps", lambda content: _shorten(content, SHARES, "lines", 50)),
)
"""What is left out of a file that would be too large, in this order: its description, and its removal."""


def page(content: Answers, most_bytes: int = MAX_BYTES) -> str:
    """The page with these answers in it.

    Args:
        found: answers by path, see `answers`.
        most_bytes: maximum length of the page; what does not fit is left out and listed in ``left_out`` of its data.

    Raises FlowError if the page is too long even without all of `LEFT_OUT`, or if its own files are not installed.
    """
    content = dict(content)
    left_out: list[str] = []
    for what, leave_out in (*LEFT_OUT, ("", lambda _: None)):
        text = _assembled(base64.b64encode(gzip.compress(to_json(content).encode(), mtime=0)).decode())
        if len(text) <= most_bytes:
            return text
        leave_out(content)
        left_out.append(what)
        content["left_out"] = f"{', '.join(left_out)}; flowrt watch on the run directory has them"
    raise FlowError(f"the page of the run would be over {most_bytes >> 20} MB; open it with flowrt watch")


def _assembled(data: str) -> str:
    """The page with its own files and the data inline, and a policy that allows only these."""
    styles: list[str] = []
    scripts: list[str] = []

    def inline(kind: str, kept: list[str]) -> Callable[[re.Match[str]], str]:
        def put(link: re.Match[str]) -> str:
            text = _own(link[1])
            if f"</{kind}" in text or "<!--" in text:
                raise FlowError(f"{link[1]} cannot be inline: it has a tag in it")
            kept.append(text)
            return f"<{kind}>{text}</{kind}>"

        return put

    text = _STYLE.sub(inline("style", styles), _AHEAD.sub("", _own(PAGE)))
    before, script, after = text.partition("<script src=")
    text = f'{before}<script id="data" type="{DATA_TYPE}">{data}</script>\n{script}{after}'
    text = _SCRIPT.sub(inline("script", scripts), text)
    policy = (
        f"default-src 'none'; script-src {_hashes(scripts)}; style-src {_hashes(styles)}; base-uri 'none'; "
        "form-action 'none'"
    )
    meta = f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">'
    return text.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{meta}', 1)


def _own(name: str) -> str:
    """A file of the page. Raises FlowError if it is not installed."""
    try:
        return (_HERE / name).read_text("utf-8")
    except FileNotFoundError:
        raise FlowError(f"{name} of the page is not installed; install flowrt again") from None


def _hashes(texts: Iterable[str]) -> str:
    """The sources of a content security policy that allow these inline texts."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the page of a run as one file.")
    parser.add_argument("run_dir", type=Path, metavar="RUN")
    parser.add_argument("file", type=Path, metavar="FILE", nargs="?")
    arguments = parser.parse_args()
    try:
        write(arguments.run_dir, arguments.file)
    except (FlowError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_FAILED
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
