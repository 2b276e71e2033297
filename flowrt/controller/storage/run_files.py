"""Files of a run: what the core's commands and the workers' reports add to them."""

import logging

from flowrt.controller.events import AppendLedger, AppendRestartLog, Command, EvaluationClosed, StepClosed
from flowrt.controller.state.counters import describe_non_finite, finite, validate_names
from flowrt.controller.storage.accounting import Accounting
from flowrt.controller.storage.event_log import EventLog
from flowrt.controller.storage.ledger import Ledger, LedgerBusy
from flowrt.controller.storage.run_metrics import RunMetrics
from flowrt.controller.storage.sample_store import GroupEnd, SampleStore
from flowrt.errors import FlowError
from flowrt.net.connection_filter import RateLimitedLog
from flowrt.protocol.messages import Report, SampleRecords

log = logging.getLogger(__name__)


class RunFiles:
    """Buffers what is added; `write` makes it durable. A locked ledger is retried, a failed disk is final."""

    def __init__(
        self,
        ledger: Ledger,
        metrics: RunMetrics,
        events: EventLog | None = None,
        times: Accounting | None = None,
        samples: SampleStore | None = None,
    ) -> None:
        """Record into these; None for files that are not written."""
        self._ledger = ledger
        self._metrics = metrics
        self._events = events
        self._times = times
        self._samples = samples
        self._busy_since_s: float | None = None
        self._warnings = RateLimitedLog()
        self._ledger_error = ""  # why the ledger file is lost; raised by the next `write`

    def record(self, command: Command, now: float) -> None:
        """Buffer a command that has to be stored; other commands are ignored. ``now``: on the controller's clock."""
        match command:
            case AppendLedger():
                self._ledger.add(command, now)
                if command.state == "in_flight":
                    self._metrics.on_training_started(now)
                    if self._times is not None:
                        self._times.training_started(now)
                elif self._samples is not None and command.state in ("trained", "dropped"):
                    self._samples.ended(GroupEnd(command.epoch, command.prompt, command.step, command.reason))
            case AppendRestartLog(entry):
                self._ledger.append_restart_log(entry)
            case StepClosed():
                if invalid := describe_non_finite((*command.inline_means, *command.metrics)):
                    self._warnings.warn("left out of the metrics of step %s: %s", command.step, invalid)
                self._ledger.add_step(command.step, self._metrics.write_step(command, now))
                if self._times is not None:
                    self._times.close_step(command.step, now)
            case EvaluationClosed(name, version) if not self._metrics.is_evaluated(name, version):
                self._ledger.add_evaluation(name, version, self._metrics.write_evaluation(command, now))
                if self._events is not None:
                    results = ", ".join(f"{key} {value:.4g}" for key, value in finite(command.numbers))
                    text = f"evaluation of version {version} on {name}: {results}"
                    self._events.add("evaluation", text, command.version, now, name=name, version=version)

    def record_report(self, worker: str, report: Report, step: int) -> None:
        """Store the busy spans and the numbers of a worker's report; ``step`` is in training.

        Numbers that are not finite are left out; so are all numbers of the report, if a name is too long or there would
        be too many names.
        """
        numbers = report.numbers
        if invalid := validate_names(numbers, self._metrics.numbers):
            self._warnings.warn("left out the numbers that %s has reported: %s", worker, invalid)
            numbers = ()
        if invalid := describe_non_finite(numbers):
            self._warnings.warn("left out of the numbers that %s has reported: %s", worker, invalid)
            numbers = tuple(finite(numbers))
        self._metrics.add_numbers(numbers)
        if self._times is not None:
            self._times.add_spans(worker, report.spans)
            if report.resources:
                self._times.add_resources(worker, report.resources)
        for name, value in numbers:
            self._ledger.add_summary_value(name, value, step)

    def record_samples(self, message: SampleRecords, step: int, now: float) -> None:
        """Store samples that a worker has sent while ``step`` was in training."""
        if self._samples is not None:
            self._samples.add(message.records, step, now)

    def write_samples(self, step: int, now: float, run_ended: bool = False) -> None:
        """Pass the buffered samples to the writer thread; log its notices, and add them to the event log.

        With ``run_ended``, wait until the thread has written them and has ended.
        """
        if self._samples is not None:
            for notice in self._samples.close() if run_ended else self._samples.tick():
                log.warning("%s", notice)
                if self._events is not None:
                    self._events.add("samples", notice, step, now)

    def compact(self, run_ended: bool = False) -> None:
        """Flush, and delete restart entries that a restarted controller would not need; all once the run has ended.

        A removed or replaced ledger makes the next `write` raise.
        """
        try:
            self._ledger.check_present()
        except FlowError as error:
            self._ledger_error = str(error)
        try:
            if run_ended:
                self._ledger.clear_restart_log()
            else:
                self._ledger.compact()
        except LedgerBusy:
            pass  # `write` counts how long it has been locked
        except FlowError as error:
            log.warning("%s; rows that are no longer needed stay there for now", error)

    def write(self, now: float, patience_s: float, sync: bool = False) -> bool:
        """Commit the buffered records; returns False while another process has the ledger locked.

        Args:
            now: seconds on the controller's clock.
            patience_s: seconds for which the ledger may stay locked.
            sync: also sync the disk, so that a power failure cannot undo the commit.

        Raises FlowError or OSError if a write has failed, the ledger was removed, or it was locked for ``patience_s``.
        """
        self._metrics.check()
        if self._ledger_error:
            raise FlowError(self._ledger_error)
        try:
            if sync:
                self._ledger.persist()
                self._metrics.persist()
            else:
                self._ledger.commit()
        except LedgerBusy as error:
            if self._busy_since_s is None:
                self._busy_since_s = now
            locked_s = now - self._busy_since_s
            if locked_s < patience_s:
                return False
            raise FlowError(f"{error}, for {locked_s:.0f} s; stop that process, and start again") from error
        self._busy_since_s = None
        return True
