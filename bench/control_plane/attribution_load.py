"""Attribution and timeline at 4,096 workers: what they cost the controller's process, and the accounting process.

``attribution_loop_share`` is the processor time of all threads of the controller's process, over the time of the run,
for 10 spans and 10 waits of each worker a second: spans in reports, waits that the core has recorded, and the ticks.
``attribution_process_share`` is that of the accounting process, ``attribution_dropped`` the spans and waits that were
lost on the way.
"""

import random
import tempfile
import time

from common.children import cpu_s

from flowrt.controller.attribution.causes import Cause, WaitInterval
from flowrt.controller.storage.accounting import Accounting
from flowrt.controller.storage.time_files import TimeFilesStart
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from flowrt.protocol.codec import decode, encode
from flowrt.protocol.spans import pack_spans
from flowrt.runtime.timeline import Span

WORKERS = 4096
PER_SECOND = 10
TICKS = 2
SECONDS = 6
KINDS = ("generate", "generate", "generate", "fetch", "swap")


def _reports(second: int, rng: random.Random) -> list[tuple[WorkerId, bytes]]:
    """The report of each worker for a second: `PER_SECOND` spans, of which some overlap with waits."""
    reports = []
    for number in range(WORKERS):
        spans = []
        for at in range(PER_SECOND):
            start_s = second + at / PER_SECOND
            match rng.choice(KINDS):
                case "generate":
                    spans.append(Span("generate", start_s, start_s + 0.06, 0.05, 12.5))
                case kind:
                    spans.append(Span(kind, start_s, start_s + 0.06, root="reward-0" if kind == "fetch" else ""))
        reports.append((WorkerId(f"rollout-{number}"), encode(m.Report(pack_spans(spans), (), ()))))
    return reports


def _waits(names: list[WorkerId], from_s: float, to_s: float) -> list[WaitInterval]:
    return [WaitInterval(name, Cause.GATE, "trainer", from_s, to_s) for name in names]


def measure(seconds: int) -> dict[str, float]:
    """Shares over ``seconds`` of a run, which pass as fast as the controller's end can work."""
    with tempfile.TemporaryDirectory() as folder:
        times = Accounting(TimeFilesStart(folder, 0.0, 0.0, 0, 1.0))
        names = [WorkerId(f"rollout-{number}") for number in range(WORKERS)]
        for name in names:
            times.joined(name, "rollout", 0.0)
        times.training_started(0.0)
        times.tick(0.0, [], [])
        rng = random.Random(0)
        spent_s = sum(_second(times, names, second, _reports(second, rng)) for second in range(seconds))
        times.close_step(0, float(seconds))
        times.tick(float(seconds), [], [])
        while times.latest is None and not times.notice():
            time.sleep(0.1)
        process_s = 0.0 if times.pid is None else cpu_s(times.pid)
        times.close(float(seconds), [], [])
        return {
            "attribution_loop_share": spent_s / seconds,
            "attribution_process_share": process_s / seconds,
            "attribution_dropped": float(times.dropped),
        }


def _second(times: Accounting, names: list[WorkerId], second: int, reports: list[tuple[WorkerId, bytes]]) -> float:
    """Processor seconds of this process for a second of the run, above those of reports without spans."""
    empty = encode(m.Report((), (), ()))
    before_s = time.process_time()
    for _ in reports:
        decode(empty)
    empty_s = time.process_time() - before_s
    before_s = time.process_time()
    for tick in range(TICKS):
        for name, data in reports[tick::TICKS]:
            report = decode(data)
            assert isinstance(report, m.Report)
            times.add_spans(name, report.spans)
            times.note_report(name, second + 1.0)
        ended = []
        for at in range(tick * PER_SECOND // TICKS, (tick + 1) * PER_SECOND // TICKS):
            ended += _waits(names, second + at / PER_SECOND + 0.05, second + (at + 1) / PER_SECOND)
        now = second + (tick + 1) / TICKS
        times.tick(now, ended, _waits(names, now - 0.01, now))
    return time.process_time() - before_s - empty_s
