"""One trial: the attempts of a run, their faults, the verdict. A trial is a generator: one process advances many."""

import contextlib
import dataclasses
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from fault_injection.damage import NEWEST, Damaged
from fault_injection.faults import DISK, EVERYTHING, FOR_EVER_S, LASTING_KINDS, LAUNCHER, LINK_KINDS, Fault, Plan
from fault_injection.launcher_process import LEAVE_S, SIGNALS_OF, LauncherProcess, has_ended, is_mapped, wait
from fault_injection.verdict import Account, account, wrong_summary

from flowrt.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED
from flowrt.recipes.config import RunConfig
from flowrt.recipes.config_io import to_toml

STEPS, PROMPTS, MEMBERS = 8, 4, 2
SHARED_MEMORY = Path("/dev/shm")
DISK_BYTES = 32 << 20
MAX_ATTEMPTS = 4
SLOW_START_FACTOR = 3.0
"""Factor of the deadline of a trial whose processes are started by python instead of forked."""
REPLACED_WITHIN_S = 5.0
POLL_S = 0.01
Steps = Generator[None, None, None]


@dataclass(slots=True)
class FaultTimes:
    """Times of one fault: ``injected_s`` on the monotonic clock, the others in seconds since then; -1: not seen."""

    fault: Fault
    injected_s: float = -1.0
    noticed_s: float = -1.0
    recovered_s: float = -1.0
    missing_s: float = -1.0
    """Group leave: seconds from the end of the worker until its replacement joined, or until now."""
    replaced: bool = False


@dataclass(slots=True)
class Outcome:
    """The verdict on one trial."""

    plan: Plan
    folder: Path
    fault_times: list[FaultTimes] = field(default_factory=list)
    injected: bool = False
    lost: int = 0
    doubled: int = 0
    hung: bool = False
    wrong: list[str] = field(default_factory=list)
    resumed: int = 0
    refused: str = ""
    resume_s: list[float] = field(default_factory=list)
    """Seconds from each `flowrt resume` to the first step that no earlier attempt had closed."""
    wall_s: float = 0.0

    @property
    def is_bad(self) -> bool:
        return bool(self.lost or self.doubled or self.hung or self.wrong)

    @property
    def noticed_s(self) -> float:
        return self.fault_times[0].noticed_s if self.fault_times else -1.0

    @property
    def recovered_s(self) -> float:
        """Seconds from the last fault of a run that was not resumed to its next step; -1 otherwise."""
        return self.fault_times[-1].recovered_s if self.fault_times and not self.resumed else -1.0

    @property
    def replaced_s(self) -> float:
        return self.fault_times[0].missing_s if self.fault_times and self.fault_times[0].replaced else -1.0

    def line(self, number: int) -> str:
        times = {"noticed": self.noticed_s, "recovered": self.recovered_s, "replaced": self.replaced_s}
        parts = [f"{name} {value:.2f} s" for name, value in times.items() if value >= 0]
        parts += [f"refused: {self.refused}"] if self.refused else []
        parts += [f"resumed {self.resumed} x" for _ in range(bool(self.resumed))]
        parts += [f"resumed: a step after {value:.2f} s" for value in self.resume_s]
        parts += [f"over after {self.wall_s:.1f} s"]
        head = f"{number:4} seed {self.plan.seed}: {self.plan}: {', '.join(parts)}"
        if not self.is_bad:
            return head
        what = [f"lost {self.lost}, doubled {self.doubled}", *(["hung"] if self.hung else []), *self.wrong]
        return f"{head}: FAILED: {'; '.join(what)}; see {self.folder}"


def filtered_per_step(config: RunConfig) -> int:
    """Prompts that the group filter drops in each step: its limit, because no sample has a reward."""
    return config.algorithm.filter.tries if config.algorithm.filter.zero_variance else 0


class Trial:
    """A run on which a plan of faults is carried out."""

    def __init__(self, plan: Plan, base: RunConfig, folder: Path, deadline_s: float, keys: Path) -> None:
        """``deadline_s`` is the time limit of each attempt in seconds; ``keys`` is a directory of CURVE keys."""
        self.folder = folder
        self.out = Outcome(plan, folder)
        self._plan = plan
        self._deadline_s = deadline_s * (SLOW_START_FACTOR if plan.starts_interpreters else 1.0)
        self._place = folder / "place"
        self._run_dir = self._place / "run"
        self._filler = self._place / "filler"
        self._config = self._configuration(base, keys)
        self._damaged: Damaged | None = None
        self._shared_before = set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()
        self._killed = False

    def _configuration(self, base: RunConfig, keys: Path) -> RunConfig:
        plan = self._plan
        # Every second run has keys, so that a worker that returns has to authenticate.
        controller = dataclasses.replace(base.controller, keys=str(keys) if plan.seed % 2 else "")
        supervisor, rollout = base.supervisor, base.rollout
        if plan.starts_interpreters:
            controller = dataclasses.replace(controller, connect_timeout_s=120.0)
            supervisor = dataclasses.replace(supervisor, role_vacancy_timeout_s=60.0)
        if plan.group == "leave":
            rollout = dataclasses.replace(rollout, workers=1)
            supervisor = dataclasses.replace(supervisor, backoff_s=0.5)
        return dataclasses.replace(
            base,
            seed=plan.seed,
            run_dir=str(self._run_dir),
            controller=controller,
            supervisor=supervisor,
            rollout=rollout,
            trainer=dataclasses.replace(base.trainer, ranks=plan.ranks),
        )

    # ---- attempts

    def course(self) -> Generator[None, None, Outcome]:
        """Yield while the trial has to wait; return the verdict."""
        began_s = time.monotonic()
        (self.folder / "tmp").mkdir(parents=True)
        self._place.mkdir()
        config = self.folder / "config.toml"
        config.write_text(to_toml(self._config))
        with contextlib.ExitStack() as stack:
            if self._plan.group == "disk":
                self._mount()
                stack.callback(self._unmount)
            yield from self._attempts(config)
            self._judge()
        self.out.wall_s = time.monotonic() - began_s
        return self.out

    def _attempts(self, config: Path) -> Steps:
        plan, out = self._plan, self.out
        faults = plan.faults
        words = ["run", "--config", str(config)]
        for number in range(MAX_ATTEMPTS):
            launcher = LauncherProcess(
                self.folder, words, [fault.victim for fault in faults if fault.kind in LINK_KINDS]
            )
            fault_times = [FaultTimes(fault) for fault in faults]
            yield from self._follow(launcher, fault_times, self._last_step() if number else None)
            out.fault_times = out.fault_times or fault_times
            out.injected = all(fault_time.injected_s >= 0 for fault_time in fault_times) and (
                out.injected or number == 0
            )
            yield from self._left(launcher, faults)
            if out.hung or out.wrong:
                return
            if launcher.code == 0:
                if number == 0 and any(fault.ends_the_launcher for fault in faults) and out.injected:
                    out.wrong.append("the launcher ended well although it was killed")
                return
            if self._damaged is not None and launcher.code in (EXIT_FAILED, EXIT_BAD_INPUT) and not out.refused:
                self._judge_refusal(launcher)
                self._damaged.repair()
            else:
                self._judge_code(launcher, fault_times)
            broken = self._account(complete=False)
            out.wrong += ["trained twice before it was resumed"] if broken.doubled else []
            if out.wrong:
                return
            self._filler.unlink(missing_ok=True)
            if number == 0 and plan.damage:
                self._damaged = Damaged(self._run_dir, plan.damage, plan.seed, self.folder / "copy")
                out.injected = out.injected and self._damaged.done
            faults = plan.resume_faults if number == 0 else ()
            if self._run_dir.exists():
                words = ["resume", str(self._run_dir)]
            out.resumed += 1
        out.wrong.append(f"it did not end well in {MAX_ATTEMPTS} attempts")

    def _follow(self, launcher: LauncherProcess, fault_times: Sequence[FaultTimes], before: int | None) -> Steps:
        """Follow one attempt to its end; ``before`` is the last step that earlier ones closed, None for the first."""
        injections = [self._inject(launcher, fault_time) for fault_time in fault_times]
        deadline_s = launcher.began_s + self._deadline_s
        resumed_s = -1.0
        while not launcher.is_over():
            if time.monotonic() > deadline_s:
                self.out.hung = True
                launcher.kill()
                break
            for injection in list(injections):
                if next(injection, self) is self:
                    injections.remove(injection)
            if before is not None and resumed_s < 0 and self._last_step() > before:
                resumed_s = time.monotonic() - launcher.began_s
                self.out.resume_s.append(resumed_s)
            yield

    # ---- faults

    def _inject(self, launcher: LauncherProcess, fault_times: FaultTimes) -> Steps:
        """Inject a fault at its time, then record when it is noticed and when the run has recovered."""
        fault = fault_times.fault
        while self._steps() < fault.after or not (self._run_dir / "config.toml").exists():
            yield
        yield from wait(lambda: False, fault.delay_s)
        while fault.victim != DISK and not launcher.find(fault.victim):
            yield
        logs = {path: path.stat().st_size for path in self._logs(launcher)}
        steps, joined = self._steps(), self._joined(fault.victim)
        processes = [] if fault.victim == DISK else launcher.find(fault.victim)
        fault_times.injected_s = began_s = time.monotonic()
        if fault.victim == DISK:
            self._fill(fault.free_bytes)
        else:
            launcher.inject(fault.victim, fault.kind, processes)
        lasts = fault.kind in LASTING_KINDS and fault.duration_s != FOR_EVER_S
        gone_s = -1.0
        while True:
            yield
            since_s = time.monotonic() - began_s
            if lasts and since_s >= fault.duration_s:
                lasts = False
                launcher.end_fault(fault.victim, fault.kind, processes)
            if fault_times.noticed_s < 0 and self._named(fault, launcher, logs):
                fault_times.noticed_s = since_s
            # There are fewer steps after a rollback to a checkpoint; the next closed step counts as the recovery.
            closed, steps_before = self._steps(), steps
            steps = closed
            if closed > steps_before and fault_times.recovered_s < 0:
                fault_times.recovered_s = since_s
            if self._plan.group != "leave" or fault_times.replaced:
                continue
            if gone_s < 0 and all(map(has_ended, processes)):
                gone_s = since_s
            if gone_s >= 0:
                fault_times.missing_s = since_s - gone_s
                fault_times.replaced = self._joined(fault.victim) > joined

    def _fill(self, free_bytes: int) -> None:
        """Fill the disk of the run up to ``free_bytes`` bytes."""
        free = shutil.disk_usage(self._place).free - free_bytes
        with contextlib.suppress(OSError), self._filler.open("wb") as filler:
            filler.write(b"\0" * max(free, 0))

    def _mount(self) -> None:
        words = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "flowrt-faults", str(self._place)]
        subprocess.run(words, check=True, timeout=20)

    def _unmount(self) -> None:
        if self.out.is_bad and self._run_dir.exists():  # keep the files of a failed trial
            shutil.copytree(self._run_dir, self.folder / "run", dirs_exist_ok=True)
        subprocess.run(["umount", "-l", str(self._place)], check=True, timeout=20)

    # ---- observations

    def _steps(self) -> int:
        """Number of closed steps."""
        try:
            return (self._run_dir / "metrics.jsonl").read_bytes().count(b"\n")
        except OSError:
            return 0

    def _last_step(self) -> int:
        return self._steps() - 1

    def _joined(self, name: str) -> int:
        log = self._run_dir / "logs" / "controller.log"
        return log.read_text(errors="replace").count(f" {name} joined (") if log.exists() else 0

    def _logs(self, launcher: LauncherProcess) -> list[Path]:
        return [launcher.output, *(self._run_dir / "logs").glob("*.log")]

    def _named(self, fault: Fault, launcher: LauncherProcess, before: dict[Path, int]) -> bool:
        """Whether a log names the victim after its size in ``before``; joining during the start does not count."""
        for path in self._logs(launcher):
            if not path.exists() or path.stat().st_size == before.get(path, 0):
                continue
            with path.open("rb") as log:
                log.seek(before.get(path, 0))
                for line in log.read().decode(errors="replace").splitlines():
                    hello = fault.after == 0 and " joined (" in line
                    if fault.victim in line and not hello and "listening" not in line:
                        return True
        return False

    # ---- the verdict

    def _left(self, launcher: LauncherProcess, faults: Sequence[Fault]) -> Steps:
        """Check that an ended attempt has left no process, no shared memory and no temporary file."""
        yield from wait(lambda: not launcher.left(), LEAVE_S)
        left = launcher.left()
        if left:
            names = []
            for process in left:
                with contextlib.suppress(psutil.Error):
                    names.append(f"{process.pid} {' '.join(process.cmdline())[:120]}")
            self.out.wrong.append(f"processes were left behind: {names}")
        launcher.kill()
        new = set(os.listdir(SHARED_MEMORY)) - self._shared_before if SHARED_MEMORY.is_dir() else set()
        # Semaphores of multiprocessing are of other programs: flowrt uses none.
        new = {name for name in new if not name.startswith("sem.mp-")}
        if shared := sorted(name for name in new if not is_mapped(SHARED_MEMORY / name)):
            self.out.wrong.append(f"shared memory was left behind: {shared}")
        # A killed process cannot remove its own temporary files.
        self._killed = self._killed or (
            self._plan.ranks > 1 and any(fault.kind in ("kill", "stop") for fault in faults)
        )
        if not self._killed and (files := sorted(os.listdir(self.folder / "tmp"))):
            self.out.wrong.append(f"temporary files were left behind: {files}")

    def _judge_code(self, launcher: LauncherProcess, fault_times: Sequence[FaultTimes]) -> None:
        """Check that the faults allow a failed attempt its exit code, and that its message names the cause."""
        code, output = launcher.code, launcher.read_output()
        faults = [fault_time.fault for fault_time in fault_times if fault_time.injected_s >= 0]
        interrupted = any(fault.interrupts for fault in faults) and code == EXIT_INTERRUPTED
        killed = any(
            fault.victim == EVERYTHING or (fault.victim, fault.kind) == ("launcher", "kill") for fault in faults
        )
        may_fail = any(fault.may_fail_the_run for fault in faults) or len(faults) > 1
        # A launcher that has not started a process yet may die of the signal itself.
        early = (
            launcher.started_nothing
            and code is not None
            and -code in [SIGNALS_OF[fault.kind] for fault in faults if fault.victim == LAUNCHER]
        )
        sentence = next((line for line in output.splitlines() if line.startswith("flowrt: ")), "")
        if "Traceback" in output:
            self.out.wrong.append("a traceback was shown")
        elif code == EXIT_FAILED and may_fail:
            words = ("No space left", "disk is full") if self._plan.group == "disk" else tuple(_names(faults))
            if not any(word in sentence for word in words):
                self.out.wrong.append(f"exit code 1, and {words} is not named: {sentence or output[-300:]}")
        elif code == EXIT_BAD_INPUT and self._plan.group == "disk" and not self._run_dir.exists():
            if "disk is full" not in sentence and "No space left" not in sentence:
                self.out.wrong.append(f"refused, and the disk is not named: {sentence or output[-300:]}")
        elif not (early or interrupted or (killed and code == -9)):
            self.out.wrong.append(f"exit code {code}: {sentence or output[-300:]}")

    def _judge_refusal(self, launcher: LauncherProcess) -> None:
        """Check the refusal of a damaged run: one sentence that names the damage, and no changed file."""
        assert self._damaged is not None
        output = launcher.read_output()
        sentences = [line for line in output.splitlines() if line.startswith("flowrt: ")]
        self.out.refused = f"exit code {launcher.code}: {' / '.join(sentences)[:300]}"
        if "Traceback" in output:
            self.out.wrong.append("a traceback was shown")
        if len(sentences) != 1:
            self.out.wrong.append(f"{len(sentences)} sentences say why it was refused: {output[-300:]}")
        if not any(self._damaged.damage.names(line) for line in sentences):
            self.out.wrong.append(f"what is damaged is not named: {sentences}")
        if self._damaged.damage.resumes:
            self.out.wrong.append("it was refused although it could have gone on")
        if launcher.code == EXIT_BAD_INPUT and (changed := self._damaged.changed()):
            self.out.wrong.append(f"it was refused, and changed {changed}")

    def _account(self, *, complete: bool) -> Account:
        filtered = filtered_per_step(self._config)
        return account(self._run_dir, STEPS * (PROMPTS + filtered), STEPS, complete, filtered)

    def _judge(self) -> None:
        """Judge the final files of the run."""
        out, plan = self.out, self._plan
        ended = not out.hung and not out.wrong
        judged = self._account(complete=ended)
        out.lost, out.doubled = judged.lost, judged.doubled
        out.wrong += [judged.fault] if judged.fault else []
        if not ended:
            return
        expected = {
            "exit_code": 0,
            "steps": STEPS,
            "samples": STEPS * PROMPTS * MEMBERS,
            "prompts.trained": STEPS * PROMPTS,
            "prompts_lost": 0,
            "prompts_trained_twice": 0,
        }
        out.wrong += wrong_summary(self._run_dir, expected)
        if "Traceback" in (self.folder / "output.txt").read_text(errors="replace"):
            out.wrong.append("a traceback was shown")
        if plan.group == "leave" and out.fault_times[0].missing_s > REPLACED_WITHIN_S:
            out.wrong.append(f"a place was empty for {out.fault_times[0].missing_s:.1f} s")
        if self._damaged is None or not self._damaged.done or out.refused:
            return
        if self._damaged.damage.resumes is False:
            out.wrong.append("it went on although it had to be refused")
        # A run must not resume from a damaged checkpoint, but from an older one.
        if self._damaged.damage.where == NEWEST and not wrong_summary(
            self._run_dir, {"resumed_from": self._damaged.newest}
        ):
            out.wrong.append("it went on from a damaged checkpoint")


def _names(faults: Sequence[Fault]) -> set[str]:
    """Names that an error message may use for the victims."""
    return {"trainer" if fault.victim.startswith(("rank", "agent")) else fault.victim.split("-")[0] for fault in faults}


def side_by_side(next_trial: Callable[[int], Trial | None], at_once: int) -> Iterator[Outcome]:
    """The outcomes of trials, at most ``at_once`` of which run at the same time, in the order in which they end.

    Args:
        next_trial: the next trial to start, given the number of those that run; None: none for now. It is asked again
            after each end; without a trial that runs, None ends the iteration.
        at_once: largest number of trials that run.
    """
    courses: list[Generator[None, None, Outcome]] = []
    while True:
        while len(courses) < at_once and (trial := next_trial(len(courses))) is not None:
            courses.append(trial.course())
        if not courses:
            return
        time.sleep(POLL_S)
        for course in list(courses):
            try:
                next(course)
            except StopIteration as over:
                courses.remove(course)
                outcome: Outcome = over.value
                yield outcome
