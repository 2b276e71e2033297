"""A random run of any size behind the API of the page, to test and measure the page alone.

The answers have the formats of `flowrt.observability.run_reader`; nothing is read from a disk but the page's own files.
"""

import asyncio
import base64
import contextlib
import json
import math
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

import flowrt.observability.page
from flowrt.ids import ROW_BITS, prompt_name
from flowrt.observability.attribution import merged
from flowrt.observability.sample_columns import SampleColumns
from flowrt.observability.sample_statistics import SampleSettings, distribution_lines, group_line, in_order
from flowrt.observability.series import Axis, Series
from flowrt.observability.time_shares import MAX_LINES

PAGE = Path(flowrt.observability.page.__file__).parent
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
CAUSES = ("samples", "gate", "weights", "update", "save", "away", "other")
KINDS = ("generate", "swap", "reward", "reference", "train", "step", "snapshot", "save", "load")
WORDS = (
    "the",
    "sum",
    "of",
    "two",
    "numbers",
    "is",
    "first",
    "we",
    "add",
    "units",
    "then",
    "tens",
    "so",
    "check",
    "total",
)
GROUP_SIZE = 8
MAX_SPANS, MAX_ROWS, MAX_COLUMNS = 20_000, 256, 512
CLOCK_S = 30.0


@dataclass(slots=True)
class DrawnRun:
    """A run of ``workers`` and ``steps``, each step about 2 s long."""

    steps: int = 120
    workers: int = 6
    seed: int = 0
    state: str = "finished"
    low: float = 0.0
    high: float = 1.0
    others: Mapping[str, "DrawnRun"] = field(default_factory=dict)
    """Runs that it is compared with, by name."""
    set_names: tuple[str, ...] = ()
    """Names of its data sets; empty: it has one."""
    texts: Sequence[str] = ()
    """Texts that replace those of samples, events, reasons and names by turns; empty: none is replaced."""
    events: list[dict[str, Any]] = field(default_factory=list)
    series: dict[str, list[float | None]] = field(default_factory=dict)
    instead: dict[str, Any] = field(default_factory=dict)
    """Answers by path that are given instead of the drawn ones."""
    _drawn: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        draw = np.random.default_rng(self.seed)
        n, rise = self.steps, 1 / (1 + np.exp(-(np.arange(self.steps) - 0.35 * self.steps) / (0.12 * self.steps + 1)))
        reward = self.low + (self.high - self.low) * np.clip(0.05 + 0.8 * rise + draw.normal(0, 0.05, n), 0, 1)
        wide = 0.18 * (self.high - self.low)
        walls = np.cumsum(draw.gamma(20, 0.1, n)) + 8
        columns = {
            "wall_s": walls,
            "reward": reward,
            "reward_p10": np.maximum(reward - wide, self.low),
            "reward_p90": np.minimum(reward + wide, self.high),
            "reward/right": np.clip(reward * 0.9, self.low, self.high),
            "reward/format": np.clip(0.4 + 0.6 * rise, 0, 1),
            "response_length": 220 - 110 * rise + draw.normal(0, 6, n),
            "length_max": np.minimum(256, 300 - 90 * rise + draw.normal(0, 15, n)),
            "truncated": np.clip(0.4 - 0.38 * rise + draw.normal(0, 0.02, n), 0, 1),
            "zero_variance_fraction": np.clip(0.3 + 0.3 * rise + draw.normal(0, 0.05, n), 0, 1),
            "kl": 0.03 * rise + np.abs(draw.normal(0, 0.002, n)),
            "mismatch_kl_k3": np.abs(draw.normal(4e-4, 1e-4, n)),
            "nll": 1.1 - 0.8 * rise + draw.normal(0, 0.02, n),
            "staleness_mean": np.clip(draw.normal(0.9, 0.1, n), 0, 2),
            "staleness_max": np.full(n, 2.0),
            "grad_norm": draw.gamma(4, 0.12, n),
            "samples": np.full(n, 128.0),
            "groups": np.full(n, 16.0),
            "tokens": 128 * (260 - 100 * rise),
            "samples_per_s": 64 + draw.normal(0, 4, n),
            "loss": draw.normal(0, 0.02, n),
            "lr": np.minimum(np.arange(n) / 10, 1) * 1e-5,
        }
        self.series = {name: [float(f"{x:.6g}") for x in column] for name, column in columns.items()}
        every = max(n // 6, 1)
        for name, scale in (("avg@4", 0.8), ("pass@4", 1.0)):
            at = [float(reward[i]) * scale if i % every == 0 or i == n - 1 else None for i in range(n)]
            self.series[f"eval/held_out/{name}"] = at
            self.series[f"eval/held_out/{name}_error"] = [None if x is None else 0.03 for x in at]
        self._draw_events()

    def _draw_events(self) -> None:
        walls, n = self.series["wall_s"], self.steps
        self.add_event("started", f"a run of {n} steps has started", 0, 0.0)
        for index in range(min(self.workers, 12)):
            self.add_event("joined", f"{self.worker(index)} has joined", 0, 2.0 + index / 10, worker=self.worker(index))
        every = max(n // 60, 1)
        for step in range(0, n, every):
            self.add_event("published", f"trainer has published version {step + 1} of policy", step, walls[step] or 0)
        lost = int(0.55 * n)
        self.add_event(
            "gone",
            "rollout-1 (rollout on host 'n2') is gone: killed by SIGKILL",
            lost,
            walls[lost] or 0,
            worker="rollout-1",
        )
        back = min(lost + max(n // 40, 1), n - 1)
        text = "rollout-1 (rollout on host 'n2') has been restarted"
        self.add_event("restarted", text, back, walls[back] or 0, worker="rollout-1")
        self.events.sort(key=lambda event: float(event["wall_s"]))
        if self.state == "finished":
            self.add_event("ended", "the run ends: all steps are trained", n - 1, (walls[-1] or 0) + 1, code=0)

    def add_event(self, kind: str, text: str, step: int, wall_s: float, **more: Any) -> dict[str, Any]:
        """Append an event; returns its line."""
        text = self.texts[len(self.events) % len(self.texts)] if self.texts else text
        line = {"wall_s": wall_s, "unix_s": 1.8e9 + wall_s, "term": 1, "step": step, "kind": kind, "text": text, **more}
        self.events.append(line)
        return line

    def worker(self, index: int) -> str:
        """The name of a worker: trainer, reference, reward, then the rollout workers."""
        first = ("trainer", "reference", "reward")
        return first[index] if index < 3 else f"rollout-{index - 3}"

    def role(self, index: int) -> str:
        return self.worker(index).split("-")[0]

    @property
    def end_s(self) -> float:
        return float(self.series["wall_s"][-1] or 0) + 1

    def answer(self, path: str, query: Mapping[str, str]) -> Any:
        """The answer to a path of the API; raises KeyError for one that does not exist."""
        if path in self.instead:
            return self.instead[path]
        match path.split("/")[1:]:
            case ["run"]:
                return self._run()
            case [
                "series"
                | "compared"
                | "differences"
                | "replay"
                | "prompts"
                | "samples"
                | "groups"
                | "distributions" as kind
            ]:
                answers = {"series": self._series, "compared": self._compared, "replay": self._replay}
                answers |= {"groups": self._groups, "distributions": self._distributions, "samples": self._samples}
                return {**answers, "prompts": self._prompts, "differences": self._differences}[kind](query)
            case ["attribution"]:
                shares = [self._attribution(step) for step in range(int(query.get("from", 0)), self.steps)]
                return {"lines": merged(shares, MAX_LINES)}
            case ["events"]:
                return {"events": self.events[int(query.get("from", 0)) :], "next": len(self.events)}
            case ["timeline"]:
                t0, t1 = float(query.get("t0", 0)), float(query.get("t1", self.end_s))
                opened = int(query["first"]) if "first" in query else None
                return self._timeline(t0, t1, int(query.get("rows", 64)), opened)
            case ["sample", number]:
                return self._opened(int(number))
            case ["prompt", _, number]:
                return self._prompt(int(number))
            case ["ledger"]:
                n = 16 * self.steps
                return {
                    "states": {"unread": 2000, "in_flight": 24, "ready": 3, "leased": 16, "trained": n, "dropped": 9},
                    "dropped": {"reward timeout": 7, "zero variance": 2},
                }
            case ["logs"]:
                lines = [self.texts[i % len(self.texts)] if self.texts else f"INFO step {i} is done" for i in range(50)]
                return {"files": {"controller.log": lines, "trainer.log": lines[:12]}}
        raise KeyError(path)

    def _series(self, query: Mapping[str, str]) -> dict[str, Any]:
        """The series of metrics in the format of `RunReader`."""
        series = Series()
        for step in range(len(self.series["wall_s"])):
            series.append(self.line(step))
        if "points" not in query:
            return series.since(int(query.get("from", 0)))
        axis: Axis = "wall_s" if query.get("x") == "wall_s" else "step"
        low, high = float(query.get("from", 0)), float(query.get("to", math.inf))
        return series.window(axis, low, high, int(query["points"]))

    def _replay(self, query: Mapping[str, str]) -> dict[str, Any]:
        """The state of the controller at an instant."""
        at_s = float(query["at"])
        step = int(np.searchsorted(np.array(self.series["wall_s"], float), at_s))
        status = self.status(step)
        graph = status["graph"]
        states = {"trainer": {"at work": 1}, "rollout": {"waiting": 2, "at work": 1}}
        return status | {
            "term": 1,
            "events": 100 * step + 1,
            "at_s": at_s,
            "slots": {
                name: {"done": 8 * step % 96, "at_work": 16 - at, "not_begun": 32 * at}
                for at, name in enumerate(("generate", "reward", "reference", "train"))
            },
            "causes": [[wait["who"], "gate", "trainer", wait["age_s"]] for wait in graph["waits"]],
            "leases": [
                {
                    "worker": "trainer",
                    "stage": "train",
                    "step": step,
                    "left_s": 812.5,
                    "samples": [[0, 7, 1], [0, 7, 2]],
                }
            ],
            "counts": {"states": states, "versions": {str(step): 2, str(step - 1): 1}},
            "versions": {"trainer": step, "rollout-1": step - 1},
            **{f"more_{name}": 0 for name in ("waits", "causes", "leases", "workers")},
        }

    def _prompts(self, query: Mapping[str, str]) -> dict[str, Any]:
        """The prompts of the ledger in a state, or dropped for a reason."""
        reason, first = query.get("reason", ""), int(query.get("offset", 0))
        ledger = self.answer("api/ledger", {})
        total = ledger["dropped"][reason] if reason else ledger["states"][query["state"]]
        shown = self.texts[0] if self.texts else reason
        prompts = [
            {"epoch": 0, "prompt": number, "name": str(number), "step": number // 4, "reason": shown, "reward": None}
            for number in range(first, min(total, first + int(query.get("limit", 50))))
        ]
        return {"prompts": prompts, "total": total}

    @staticmethod
    def _prompt(number: int) -> dict[str, Any]:
        step = number // 4
        return {
            "events": [
                {"at_s": step + i, "state": state, "step": step, "reason": "", "reward": None}
                for i, state in enumerate(("in_flight", "ready", "leased", "trained"))
            ]
        }

    def _compared(self, query: Mapping[str, str]) -> dict[str, Any]:
        runs = [{"name": name, "state": run.state, **run._series(query)} for name, run in self.others.items()]
        return {"runs": runs}

    def _differences(self, _: Mapping[str, str]) -> dict[str, Any]:
        values = [run.seed for run in (self, *self.others.values())]
        return {"settings": [["seed", *values], ["reward.functions", *map(str, values[:-1]), None]]}

    def _run(self) -> dict[str, Any]:
        config = {
            "seed": self.seed,
            "steps": self.steps,
            "staleness": 2,
            "algorithm": {"kl": {"coef": 0.001}, "loss": {"type": "ppo"}},
            "eval": {"interval": 20},
            "samples": {"per_step": 32, "mb": 256},
            "timeline": {"mb": 512},
        }
        changed = [["algorithm.loss.type", "ppo", "reinforce"], ["eval.interval", 20, 0], ["staleness", 2, 1]]
        summary = {
            "steps": self.steps,
            "wall_s": self.end_s,
            "samples_per_s": 63.2,
            "reason": "all steps are trained",
            "exit_code": 0,
        }
        present = ("metrics.jsonl", "attribution.jsonl", "events.jsonl", "timeline", "samples.sqlite", "ledger.sqlite")
        return {
            "name": self.texts[0] if self.texts else "arithmetic-0042",
            "recipe": "arithmetic",
            "state": self.state,
            "config": config,
            "changed": changed,
            "summary": summary if self.state == "finished" else None,
            "files": dict.fromkeys(present, "present"),
            "steps": self.steps,
            "staleness_bound": 2,
            "compared": list(self.others),
        }

    def _attribution(self, step: int) -> dict[str, Any]:
        draw = random.Random(self.seed * 1_000_003 + step)
        walls = self.series["wall_s"]
        start, end = float(walls[step - 1] or 0) if step else 0.0, float(walls[step] or 0)
        roles: dict[str, dict[str, float]] = {}
        roots: list[list[Any]] = []
        worst: dict[str, list[list[Any]]] = {}
        shares = {
            "trainer": (0.86, 0.06, 0.0, 0.0, 0.03, 0.01, 0.0, 0.02),
            "rollout": (0.46, 0.02, 0.33, 0.09, 0.04, 0.0, 0.02, 0.02),
            "reward": (0.22, 0.76, 0.0, 0.0, 0.0, 0.0, 0.0, 0.02),
            "reference": (0.36, 0.61, 0.0, 0.0, 0.0, 0.0, 0.0, 0.03),
        }
        for role, means in shares.items():
            count = max(self.workers - 3, 1) if role == "rollout" else 1
            drawn = [mean * draw.uniform(0.7, 1.3) for mean in means]
            scale = count * (end - start) / sum(drawn)
            roles[role] = {
                "workers": count,
                **{cause: round(x * scale, 4) for cause, x in zip(("busy", *CAUSES), drawn, strict=True)},
            }
        roots.append(["rollout", "gate", "trainer", round(roles["rollout"]["gate"] * 0.66, 4)])
        roots.append(["rollout", "gate", "rollout-1", round(roles["rollout"]["gate"] * 0.21, 4)])
        roots.append(["rollout", "weights", "trainer", roles["rollout"]["weights"]])
        roots.append(["reward", "samples", "rollout-1", round(roles["reward"]["samples"] * 0.4, 4)])
        for cause in ("gate", "weights", "samples"):
            worst[cause] = [
                [self.worker(3 + draw.randrange(max(self.workers - 3, 1))), round(draw.uniform(0.2, 1), 3)]
                for _ in range(3)
            ]
        line = {"step": step, "from_s": start, "to_s": end, "roles": roles, "roots": roots, "worst": worst}
        return {**line, "resources": self._resources(start, end, draw)}

    def _resources(self, start_s: float, end_s: float, draw: random.Random) -> dict[str, Any]:
        """What the workers use: trainer and rollout workers on accelerators, the others on processors."""
        roles: dict[str, Any] = {}
        for role, count in (("trainer", 1), ("rollout", max(self.workers - 3, 1)), ("reward", 1), ("reference", 1)):
            figures = {"processors": _spread(draw, 1.1, count), "memory": _spread(draw, 3e9, count)}
            has_device = role in ("trainer", "rollout")
            if has_device:
                figures["device_use"] = [min(value, 1.0) for value in _spread(draw, 0.8, count)]
                figures["device_allocated"] = _spread(draw, 5e10, count)
                figures |= {"device_reserved": _spread(draw, 6e10, count), "device_total": [8.5e10] * 3}
            if role == "rollout":
                figures |= {"cache": _spread(draw, 0.6, count), "tokens_per_s": _spread(draw, 900.0, count)}
            roles[role] = {"workers": count, "devices": count * has_device, "figures": figures}
        roles["rollout"]["tokens_per_s"] = roles["rollout"]["figures"]["tokens_per_s"][1] * roles["rollout"]["workers"]
        names = [self.worker(3 + draw.randrange(max(self.workers - 3, 1))) for _ in range(3)]
        worst = {name: [[who, value] for who in names] for name, value in (("device_use", 0.2), ("memory", 5e9))}
        return {"from_s": start_s, "to_s": end_s, "roles": roles, "worst": worst}

    def _timeline(self, t0: float, t1: float, rows: int, first: int | None) -> dict[str, Any]:
        t0, t1 = max(t0, 0.0), min(t1, self.end_s)
        shown = range(self.workers) if first is None else range(first, min(first + rows, self.workers))
        answer: dict[str, Any] = {
            "t0": t0,
            "t1": t1,
            "lanes": [{"worker": self.worker(i), "role": self.role(i)} for i in shown],
            "kinds": list(KINDS),
            "causes": list(CAUSES),
            "roots": ["", "trainer", "rollout-1"],
            "spans": [],
            "waits": [],
            "matrix": None,
            "left_out": 0,
        }
        if first is not None:
            answer |= {"first": first, "of": self.workers}
        if (first is None and self.workers > rows) or len(shown) * (t1 - t0) > MAX_SPANS:
            count = min(len(shown), MAX_ROWS)
            grid = np.linspace(t0, t1, MAX_COLUMNS)[None, :]
            row = np.arange(count)[:, None]
            busy = (
                0.5
                + 0.4 * np.sin(grid / 9 + row / 17) * np.cos(row / 5)
                + np.random.default_rng(1).normal(0, 0.06, (count, MAX_COLUMNS))
            )
            cells = (255 * np.clip(busy, 0, 1)).astype(np.uint8).tobytes()
            answer["matrix"] = {"columns": MAX_COLUMNS, "rows": count, "base64": base64.b64encode(cells).decode()}
            return answer
        for lane, index in enumerate(shown):
            self._lane(answer, lane, index, t0, t1)
        return answer

    def _lane(self, answer: dict[str, Any], lane: int, index: int, t0: float, t1: float) -> None:
        """Spans and waits of a worker: cycles of about two seconds, each drawn from the worker and its number."""
        works = {
            "trainer": (("train", 1.3), ("step", 0.2), ("snapshot", 0.1)),
            "reference": (("reference", 0.7),),
            "reward": (("reward", 0.45),),
            "rollout": (("generate", 0.9), ("swap", 0.08)),
        }
        cycle = 2.0
        for turn in range(max(int(t0 / cycle) - 1, 0), int(t1 / cycle) + 1):
            draw = random.Random(index * 7_919 + turn)
            at = turn * cycle + draw.uniform(0, 0.25)
            for kind, mean_s in works[self.role(index)]:
                end = at + mean_s * draw.uniform(0.7, 1.2)
                answer["spans"].append(
                    [lane, KINDS.index(kind), round(at, 4), round(end, 4), 24.5 if kind == "generate" else None]
                )
                at = end
            cause = {"rollout": "gate", "trainer": "samples"}.get(self.role(index), "samples")
            answer["waits"].append(
                [lane, CAUSES.index(cause), 1 if cause == "gate" else 0, round(at, 4), round((turn + 1) * cycle, 4)]
            )

    def _sample(self, number: int) -> dict[str, Any]:
        draw = random.Random(number)
        prompt, member = divmod(number, GROUP_SIZE)
        step = prompt // 4
        if self.set_names:
            prompt |= prompt % len(self.set_names) << ROW_BITS
        share = min(max(random.Random(prompt).random() + draw.gauss(0, 0.3), 0), 1)
        reward = round(self.low + (self.high - self.low) * share, 3)
        timeout = number % 97 == 5
        text = f"{draw.randrange(100)} + {draw.randrange(100)} = ?"
        completion = " ".join(draw.choice(WORDS) for _ in range(draw.randrange(15, 90)))
        if self.texts:
            text, completion = (self.texts[(number + i) % len(self.texts)] for i in range(2))
        parts = {"right": float(reward > 0.5), "format": 1.0}
        finish, reason = ("length" if number % 5 == 0 else "stop"), ("timeout" if timeout else "")
        return {
            "id": number,
            "step": step,
            "epoch": 0,
            "prompt": prompt,
            "name": prompt_name(prompt, self.set_names),
            "member": member,
            "run_attempt": 1,
            "reward": reward,
            "advantage": round(draw.gauss(0, 1), 4),
            "parts": parts,
            "tokens": completion.count(" ") + 1,
            "staleness": draw.randrange(3),
            "finish": finish,
            "reason": reason,
            "prompt_text": text,
            "completion": completion,
        }

    def _samples(self, query: Mapping[str, str]) -> dict[str, Any]:
        samples = self._chosen(query)
        if group := query.get("group"):
            samples = [
                sample for sample in self._all_samples() if sample["id"] // GROUP_SIZE == int(group) // GROUP_SIZE
            ]
        order = {"worst": "reward", "best": "-reward", "newest": "-id", "": "-id"}.get(*[query.get("order", "")] * 2)
        name = {"ended": "finish"}.get(order.removeprefix("-"), order.removeprefix("-"))
        samples.sort(key=lambda sample: sample.get(name, sample["id"]), reverse=order.startswith("-"))
        offset, limit = int(query.get("offset", 0)), int(query.get("limit", 50))
        shown = [
            sample | {"prompt_text": sample["prompt_text"][:2000], "completion": sample["completion"][:2000]}
            for sample in samples
        ]
        return {"samples": shown[offset : offset + limit], "total": len(samples)}

    def _all_samples(self) -> list[dict[str, Any]]:
        if not self._drawn:
            self._drawn = [self._sample(number) for number in range(max(min(32 * self.steps, 2_000), len(self.texts)))]
        return list(self._drawn)

    def _chosen(self, query: Mapping[str, str]) -> list[dict[str, Any]]:
        """The samples that match a query."""
        samples = self._all_samples()
        if reason := query.get("reason"):
            samples = [sample for sample in samples if reason in (sample["reason"], sample["finish"])]
        if text := query.get("grep"):
            samples = [sample for sample in samples if text in sample["completion"] or text in sample["prompt_text"]]
        if prompt := query.get("prompt"):
            samples = [sample for sample in samples if sample["prompt"] == int(prompt)]
        least, most = int(query.get("shortest", 0)), int(query.get("longest", 10**9))
        samples = [sample for sample in samples if least <= sample["tokens"] <= most]
        if first := query.get("from"):
            samples = [sample for sample in samples if sample["step"] >= int(first)]
        if last := query.get("to"):
            samples = [sample for sample in samples if sample["step"] <= int(last)]
        return samples

    def _groups(self, query: Mapping[str, str]) -> dict[str, Any]:
        samples, settings = self._columns(query), self._sample_settings(query)
        groups = settings.groups(samples, is_evaluation=False)
        places = in_order(groups, np.arange(len(groups)), query.get("order") or "newest")
        offset, limit = int(query.get("offset", 0)), int(query.get("limit", 50))
        texts = {sample["id"]: sample["prompt_text"] for sample in self._all_samples()}
        lines = [
            group_line(groups, int(place), settings, "", texts[int(groups.id_G[place])])
            for place in places[offset : offset + limit]
        ]
        return {"groups": lines, "total": len(groups), "from_step": None, "right_from": settings.right_from}

    def _distributions(self, query: Mapping[str, str]) -> dict[str, Any]:
        samples = self._columns(query)
        return {**distribution_lines(samples, self._columns({}), self._sample_settings(query)), "from_step": None}

    def _sample_settings(self, query: Mapping[str, str]) -> SampleSettings:
        middle = (self.low + self.high) / 2
        return SampleSettings(self.set_names, GROUP_SIZE, float(query.get("right") or middle))

    def _columns(self, query: Mapping[str, str]) -> SampleColumns:
        rows = self._chosen(query)
        numbers = {
            name: np.array([row[name] for row in rows], np.int64)
            for name in ("id", "step", "epoch", "prompt", "member", "tokens", "run_attempt")
        }
        return SampleColumns(
            id_N=numbers["id"],
            step_N=numbers["step"],
            version_N=np.zeros(len(rows), np.int64),
            run_attempt_N=numbers["run_attempt"],
            epoch_N=numbers["epoch"],
            prompt_N=numbers["prompt"],
            member_N=numbers["member"],
            attempt_N=np.zeros(len(rows), np.int64),
            tokens_N=numbers["tokens"],
            reward_N=np.array([row["reward"] for row in rows], np.float64),
            advantage_N=np.array([row["advantage"] for row in rows], np.float64),
            staleness_N=np.array([row["staleness"] for row in rows], np.float64),
            is_truncated_N=np.array([row["finish"] == "length" for row in rows], np.bool_),
            is_flagged_N=np.zeros(len(rows), np.bool_),
            is_rolled_back_N=np.zeros(len(rows), np.bool_),
        )

    def _opened(self, number: int) -> dict[str, Any]:
        sample, draw = self._sample(number), random.Random(number)
        tokens = []
        for index, word in enumerate(sample["completion"].split(" ")[:500]):
            logprob = -(abs(draw.gauss(0, 1.2)) ** 2)
            version = sample["step"] + int(index > 20)
            tokens.append(
                {
                    "text": word + " ",
                    "id": draw.randrange(32_000),
                    "logprob": logprob,
                    "trainer_logprob": logprob + draw.gauss(0, 0.03),
                    "version": version,
                }
            )
        versions = {"version_min": sample["step"], "version_max": sample["step"] + 1}
        return {
            **sample,
            **versions,
            "tokens": tokens,
            "generate_s": 1.4,
            "reward_s": 0.02,
        }

    def status(self, step: int) -> dict[str, Any]:
        """A brief status of a live run in this step."""
        waits = [
            {
                "who": self.worker(3),
                "what": f"newer weights: version {step} would be too old",
                "blocked_on": "trainer",
                "age_s": 1.4,
                "limit_s": 900.0,
                "overdue": False,
                "unsatisfiable": False,
            },
            *(
                {
                    "who": "source",
                    "what": f"admission: 32 groups live, step {step} in training",
                    "blocked_on": "trainer",
                    "age_s": 0.7,
                    "limit_s": None,
                    "overdue": False,
                    "unsatisfiable": False,
                }
                for _ in range(16)
            ),
            {
                "who": "reward",
                "what": "samples",
                "blocked_on": f"{self.worker(3)}, rollout-1",
                "age_s": 0.2,
                "limit_s": 900.0,
                "overdue": False,
                "unsatisfiable": False,
            },
        ]
        workers = [
            [self.worker(i), self.role(i), "at work" if i % 3 == 0 else "waiting", 0.2, "96 samples" if i == 0 else ""]
            for i in range(min(self.workers, 256))
        ]
        return {
            "step": step,
            "steps": self.steps,
            "live_groups": 32,
            "workers": {self.worker(i): self.role(i) for i in range(min(self.workers, 256))},
            "versions": {},
            "latest_version": step,
            "dropped": {},
            "cut_off": {},
            "vacancies": {},
            "waits": [],
            "graph": {"workers": workers, "waits": waits, "deadlocks": [], "more": 0, "others": 0},
            "guards": {"firing": [], "log": []},
            "latest": {},
            "numbers": {},
            "evaluated": {},
            "ended": None,
            "resources": self._resources(0.0, 5.0, random.Random(self.seed)),
        }

    def line(self, step: int) -> dict[str, Any]:
        """The line of a step, as metrics.jsonl has it."""
        return {
            "step": step,
            **{name: column[step] for name, column in self.series.items() if column[step] is not None},
        }


def _spread(draw: random.Random, middle: float, count: int) -> list[float]:
    """The least, the median and the largest value of this many workers."""
    middle *= draw.uniform(0.9, 1.1)
    return [middle * 0.7, middle, middle * 1.2] if count > 1 else [middle] * 3


def document(run: DrawnRun) -> dict[str, Any]:
    """The answers of the API that a page in one file contains, by path."""
    named = {path: run.answer(path, {}) for path in ("api/run", "api/ledger", "api/logs")}
    for path in ("api/series", "api/attribution", "api/events"):
        named[f"{path}?from=0"] = run.answer(path, {"from": "0"})
    named[f"api/timeline?t0=0&t1={run.end_s}"] = run.answer("api/timeline", {})
    if run.others:
        named |= {path: run.answer(path, {}) for path in ("api/compared", "api/differences")}
    named["api/samples?order=worst"] = run.answer("api/samples", {"order": "worst", "limit": "100"})
    named["api/groups?order=newest"] = run.answer("api/groups", {"order": "newest", "limit": "100"})
    named["api/distributions"] = run.answer("api/distributions", {})
    named["api/samples?order=best"] = run.answer("api/samples", {"order": "best", "limit": "100"})
    for sample in named["api/samples?order=worst"]["samples"]:
        named[f"api/sample/{sample['id']}"] = run.answer(f"api/sample/{sample['id']}", {})
    return named


class DrawnServer:
    """A server of the page and of a drawn run; `push` sends an event to all pages that are open."""

    def __init__(self, run: DrawnRun, port: int = 0) -> None:
        self.run = run
        self.port = port
        self.asked: list[str] = []
        """Paths of all requests."""
        self._watchers: set[asyncio.Queue[bytes]] = set()
        self._ready: dict[str, bytes] = {}
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/api/stream", self._stream)
        app.router.add_get("/{path:.*}", self._get)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            for queue in self._watchers:
                queue.put_nowait(b"")
            await self._runner.cleanup()
            self._runner = None

    def push(self, event: str, data: Mapping[str, Any]) -> None:
        text = f"event: {event}\ndata: {json.dumps(data)}\n\n".encode()
        for queue in self._watchers:
            queue.put_nowait(text)

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    async def _get(self, request: web.Request) -> web.StreamResponse:
        path = request.match_info["path"] or "page.html"
        self.asked.append(request.path_qs)
        headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
        if path.startswith("api/"):
            try:
                body = self._answer(path, request)
            except KeyError:
                return web.Response(status=404, text="there is no such answer", headers=headers)
            response = web.Response(body=body, content_type="application/json", headers=headers)
            response.enable_compression()
            return response
        file = PAGE / path
        if file.suffix not in (".html", ".css", ".js") or file.parent != PAGE or not file.exists():
            return web.Response(status=404, text="there is no such file", headers=headers)
        kind = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}[file.suffix]
        return web.Response(body=file.read_bytes(), content_type=kind, charset="utf-8", headers=headers)

    def prepare(self, *paths: str) -> None:
        """Encode the answers to these paths beforehand, so that only the page's own time is measured."""
        for path in paths:
            name, _, query = path.partition("?")
            pairs = dict(pair.split("=", 1) for pair in query.split("&") if pair)
            self._ready[f"/{path}"] = _encode(self.run.answer(name, pairs))

    def _answer(self, path: str, request: web.Request) -> bytes:
        if request.path_qs in self._ready:
            return self._ready[request.path_qs]
        return _encode(self.run.answer(path, request.query))

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._watchers.add(queue)
        try:
            await response.write(b"retry: 300\n\n")
            while text := await queue.get():
                await response.write(text)
        except ConnectionResetError:
            pass
        finally:
            self._watchers.discard(queue)
        return response


def _encode(answer: Any) -> bytes:
    return json.dumps(_finite(answer)).encode()


def _finite(value: Any) -> Any:
    """The value with NaN and infinity, which JSON does not have, replaced by None."""
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {name: _finite(item) for name, item in value.items()}
        case list():
            return [_finite(item) for item in value]
    return value


@contextlib.asynccontextmanager
async def serving(run: DrawnRun) -> AsyncIterator[DrawnServer]:
    """A server for as long as the block runs."""
    server = DrawnServer(run)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
