"""One real run in this process: the local launcher with its own supervision, and somebody who interferes."""

import asyncio
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from flowrt.launch.local import LocalRun
from flowrt.launch.processes import Child
from flowrt.launch.progress import LiveView
from rich.console import Console

from faulty.faults import FOR_EVER_S, Fault
from faulty.nursery import Forked
from faulty.relay import Relay
from flowrt.recipes.config import RunConfig

LOOK_EVERY_S = 0.01


@dataclass(slots=True)
class Notes:
    """What was seen of a run; times in seconds from the fault, -1 for what never came."""

    code: int = -1
    reason: str = ""
    struck: bool = False
    pid: int = -1
    noticed_s: float = -1.0
    noticed_by: str = ""
    recovered_s: float = -1.0

    def to_table(self) -> dict[str, object]:
        return asdict(self)


class Trial(LocalRun):
    """`flowrt run` with forked processes and a fault."""

    def __init__(self, config: RunConfig, console: Console, forked: Forked, fault: Fault | None, output: Path) -> None:
        super().__init__(config, console)
        forked.adopt(self._children)
        self._children = self._forked = forked
        self._fault = fault
        self._output = output
        self._relay = Relay()
        self._proxy = ""
        forked.rewrite = self._through_relay
        self.notes = Notes()

    async def _work(self, view: LiveView) -> int:
        self._proxy = await self._relay.listen()
        if self._fault is None:
            return await super()._work(view)
        interference = asyncio.create_task(self._interfere(self._fault))
        try:
            return await super()._work(view)
        finally:
            if interference.done():
                interference.result()
            interference.cancel()
            self._relay.close()

    def _through_relay(self, name: str, words: list[str]) -> list[str]:
        """The victim's command, with the relay in place of the controller."""
        if self._fault is None or self._fault.kind not in ("hang up", "hush") or name != self._fault.victim:
            return words
        at = words.index("--controller") + 1
        self._relay.target, words[at] = words[at], self._proxy
        return words

    def _farewell(self, code: int) -> None:
        """No picture."""
        self.notes.code, self.notes.reason = code, self._failure or self._ended

    # ---- the fault

    async def _interfere(self, fault: Fault) -> None:
        while self._steps() < fault.after:  # noqa: ASYNC110 (a file tells nobody that it has grown)
            await asyncio.sleep(LOOK_EVERY_S)
        await asyncio.sleep(fault.delay_s)
        while (victim := self._victim(fault.victim)) is None:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_EVERY_S)
        before = {path: path.stat().st_size for path in self._logs()}
        steps, struck_s = self._steps(), time.monotonic()
        self.notes.struck, self.notes.pid = True, victim.process.pid
        self._strike(fault, victim)
        while self.notes.recovered_s < 0 or self.notes.noticed_s < 0 or time.monotonic() < struck_s + fault.for_s:
            await asyncio.sleep(LOOK_EVERY_S)
            since_s = time.monotonic() - struck_s
            if since_s >= fault.for_s and self._is_lasting(fault):
                self._relent(fault, victim)
                fault = Fault(fault.victim, fault.kind, fault.after, fault.delay_s)
            if self.notes.noticed_s < 0 and (line := self._word_of(fault, before)):
                self.notes.noticed_s, self.notes.noticed_by = since_s, line
            # Fewer steps than before: the run went back to a checkpoint, and has to close one anew.
            closed, steps_before = self._steps(), steps
            steps = closed
            if closed > steps_before and self.notes.recovered_s < 0:
                self.notes.recovered_s = since_s

    @staticmethod
    def _is_lasting(fault: Fault) -> bool:
        return fault.kind in ("stop", "hush") and fault.for_s != FOR_EVER_S

    def _strike(self, fault: Fault, victim: Child) -> None:
        match fault.kind:
            case "kill":
                victim.process.kill()
            case "stop":
                victim.process.send_signal(signal.SIGSTOP)
            case "hang up":
                self._relay.hang_up()
            case _:
                self._relay.hush()

    def _relent(self, fault: Fault, victim: Child) -> None:
        if fault.kind == "stop":
            victim.process.send_signal(signal.SIGCONT)
        else:
            self._relay.resume()

    # ---- what there is to see

    def _victim(self, name: str) -> Child | None:
        """Its present process, which may be a later one than the first."""
        return next((child for child in self._forked.running() if child.name == name), None)

    def _steps(self) -> int:
        path = self._run_dir / "metrics.jsonl"
        try:
            return path.read_bytes().count(b"\n")
        except OSError:
            return 0

    def _logs(self) -> list[Path]:
        return [self._output, *(self._run_dir / "logs").glob("*.log")]

    def _word_of(self, fault: Fault, before: dict[Path, int]) -> str:
        """The first line since then in which somebody names the victim; a hello at the start is no such word."""
        for path in self._logs():
            size = path.stat().st_size
            if size == before.get(path, 0):
                continue
            with path.open("rb") as log:
                log.seek(before.get(path, 0))
                for line in log.read().decode(errors="replace").splitlines():
                    hello = fault.after == 0 and " joined (" in line
                    if fault.victim in line and not hello and "listening" not in line:
                        return f"{path.name}: {line[-120:]}"
        return ""
