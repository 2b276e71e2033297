"""A simulated worker: speaks the protocol, keeps sets of keys for tensors, does its work in any order.

What a real worker would choke on (a tensor that is neither here nor coming, a gap in a lane, half a group) raises
AssertionError at the moment at which it would have choked.
"""

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from flowrt.controller.events import Event, MessageReceived, WorkerConnected
from flowrt.controller.policies.group_filter import DECISION
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from flowrt.protocol.messages import NO_BASE, NO_LIMIT, NO_VERSION, Incoming, LaneTurn, Part, Values, Weights
from tests.simulation.rows import Job, Key, LaneId, Packet, Row, Shared, Turns, keys_of, lane_of, rows_of
from tests.simulation.scenario import (
    COLUMNS,
    GROUP_COLUMNS,
    MODEL,
    TENSORS_MADE,
    decision,
    next_prompts,
    offered_lengths,
)


class Worker:
    """One process of the cluster; what it may do next is up to the simulation's order."""

    def __init__(self, worker: str, role: str, shared: Shared) -> None:
        self.id, self.role, self.shared, self.alive = WorkerId(worker), role, shared, True
        self.inbox: deque[m.Message] = deque()
        self.outbox: deque[Event] = deque([WorkerConnected(self.id, role, "host")])
        self.have: dict[Key, tuple[int, int]] = {}  # length, and the request of the commit that made it
        self.coming: dict[Key, LaneTurn] = {}
        self.failed: set[LaneTurn] = set()
        self.sequences: dict[LaneId, int] = {}
        self.expected: Turns = defaultdict(deque)
        self.weights: set[int] = set()
        self.going_back: set[LaneTurn] = set()  # turns that bring an older version than the one in use
        self.told: Counter[int] = Counter()  # versions that the controller was told of, and has not retired since
        self.forms: dict[tuple[int, int], Weights] = {}  # whole or as changes, here or coming
        self.relays: dict[Weights, list[LaneTurn]] = defaultdict(list)  # turns that pass on what is still coming
        self.applied = 0
        self.staged = 0
        self.jobs: list[Job] = []
        self.pulling = False
        self.pull_request = -1
        self.withdrawn: set[int] = set()
        self.requests = 0
        self.prompts = 0  # that the source has offered to train on
        self.offers: dict[int, m.Offer] = {}
        self.closed = False  # nothing more comes: of this step (trainer), of the run (source)
        self.step = 0
        self.trained: list[Row] = []
        self.hung = False  # it serves others, and its role does nothing
        self.leaving = self.left = False  # told to leave; has done so: it gets nothing more to do
        self.unpublished: int | None = None
        self.rewards: dict[int, float] = {}  # of the slots of the latest grant of each
        if role == "rollout":
            self.send(m.WeightsActivated(MODEL, 0))

    def send(self, message: m.Message) -> None:
        self.outbox.append(MessageReceived(self.id, message))

    # ---- orders of the controller

    def receive(self, message: m.Message) -> None:  # noqa: C901 - one case for each message
        match message:
            case m.Grant():
                self._granted(message)
            case m.OfferAccepted(request, group):
                offer = self.offers.pop(request)
                if group < 0 and offer.flow == "eval":
                    self.shared.lost.add(offer.at_most)
                else:
                    self.closed = self.closed or group < 0
                for one in offer.lengths if group >= 0 else ():
                    for item, length in enumerate(one.lengths, group):
                        self.have[one.column, item] = (length, -1)
            case m.Rejected(request):
                assert request in self.withdrawn or self.leaving, f"{self.id} was refused: {message.reason}"
                self._answered(request)
                self.left = request not in self.withdrawn
                if self.left:
                    self.trained.clear()  # of a step that is not made
            case m.Drain():
                self.leaving = True
            case m.Committed(request, refused):
                # The slot may have come back to this worker and been made again since: only what this commit made.
                made = [key for key, (_, by) in self.have.items() if by == request and key[1] in refused]
                for key in made:
                    del self.have[key]
            case m.ReleaseTensors(columns, slots, groups):
                for name in columns or [column.name for column in COLUMNS]:
                    for item in groups if name in GROUP_COLUMNS else slots:
                        self.have.pop((name, item), None)
                        self.coming.pop((name, item), None)
                # Work on a slot whose tensors are void has no lease any more.
                self._keep(lambda row: all(key in self.have or key in self.coming for key in row.needs))
            case m.Stop():
                assert self.leaving, f"{self.id} is sent away, and nobody had asked it to leave"
                assert not self.jobs, f"{self.id} is sent away, and works on {self.jobs}"
                self.send(m.Leave(""))
            case m.SendSamples(turn, parts):
                self._must_have(keys_of(parts), turn)
                self._issue(turn, parts, self.shared.sent)
            case m.SendWeights():
                self._serve_weights(message)
            case m.VersionLost(version):
                self.shared.lost.add(version)
            case m.ReceiveWeights(turn, weights, older):
                self.going_back.update([turn] if older else ())
                based = weights.base == NO_BASE or weights.base in self.weights
                assert based, f"{self.id} is sent changes to {weights.base}, but has {self.weights}"
                self.forms[weights.version, weights.base] = weights
                self._issue(turn, weights, self.expected)
            case m.EvictVersion(_, version):
                # A version that was fetched twice may be retired between the two: the second word is still under way.
                assert self.told[version], f"{self.id} has to retire version {version}, but has {self.weights}"
                self.told[version] -= 1
                self.weights.discard(version)
                self.forms = {form: weights for form, weights in self.forms.items() if form[0] != version}
            case _:
                raise AssertionError(f"{self.id} was sent {message}")

    def _serve_weights(self, order: m.SendWeights) -> None:
        weights = self.forms.get((order.version, order.base))
        if weights is not None and order.version in self.weights:
            self._issue(order.turn, weights, self.shared.sent)
            return
        self._skip(order.turn)
        if weights is not None:
            self.relays[weights].append(order.turn)
        else:  # its own fetch has failed, which the controller is about to hear
            assert any(turn.kind == "weights" for turn in self.failed), f"{self.id} was never sent {order}"
            self.shared.broken.add(lane_of(order.turn))

    def _must_have(self, keys: dict[Key, int], turn: LaneTurn) -> None:
        for key, length in keys.items():
            state = "it is still coming" if key in self.coming else "it is not here"
            assert self.have.get(key, (-1,))[0] == length, f"{self.id} has to serve {key} ({turn}): {state}"

    def _issue(self, turn: LaneTurn, packet: Packet, end: Turns) -> None:
        """Take the next turn of a lane, at either end."""
        self._skip(turn)
        end[lane_of(turn)].append((turn, packet))

    def _skip(self, turn: LaneTurn) -> None:
        lane = lane_of(turn)
        due = self.sequences.get(lane, 0)
        assert turn.sequence == due, f"{self.id}: {turn} came where turn {due} was due"
        self.sequences[lane] = due + 1

    def _answered(self, request: int) -> None:
        assert request == self.pull_request, f"{self.id} got an answer to request {request}, for which it does not wait"
        self.pulling, self.pull_request = False, -1

    def _granted(self, grant: m.Grant) -> None:
        self._answered(grant.request)
        self.closed = self.closed or grant.closed
        for incoming in grant.incoming:
            for key in keys_of(incoming.parts):
                self.have.pop(key, None)
                self.coming[key] = incoming.turn
            self._issue(incoming.turn, incoming.parts, self.expected)
        for key, length in keys_of(grant.parts).items():
            known = key in self.coming or self.have.get(key, (-1,))[0] == length
            assert known, f"{self.id} was granted slots {grant.slots}, but {key} is neither here nor coming"
        columns = {one.column: one.values for one in grant.inline}
        self.rewards.update(zip(grant.slots, columns.get("reward", ()), strict=False))
        rows = list(rows_of(grant, "train" if self.role == "trainer" else self.role))
        # A slot that is granted again was taken away before: its old lease has ended.
        self._keep(lambda row: row.slot not in grant.slots)
        if self.role == "rollout":
            self.jobs += [Job([row]) for row in rows]
        elif rows:
            self.jobs.append(Job(rows))

    def _keep(self, valid: Callable[[Row], bool]) -> None:
        if self.role == "trainer":
            # A batch of whole groups is trained as it was granted or not at all.
            for job in [job for job in self.jobs if not all(map(valid, job.rows))]:
                self.abandon(job, False, "a part of it is void")
            return
        for job in self.jobs:
            job.rows = [row for row in job.rows if valid(row)]
        self.jobs = [job for job in self.jobs if job.rows]

    # ---- lanes

    def arrived(self, turn: LaneTurn, packet: Packet) -> None:
        """A transfer came whole."""
        if isinstance(packet, Weights):
            self.weights.add(packet.version)
            self.forms[packet.version, NO_BASE] = replace(packet, base=NO_BASE)
            self.staged = packet.version if turn in self.going_back else max(self.staged, packet.version)
            for relayed in self.relays.pop(packet, ()):
                self.shared.sent[lane_of(relayed)].append((relayed, packet))
            self.told[packet.version] += 1
            self.send(m.WeightsStaged(MODEL, packet.version))
            return
        for key, length in keys_of(packet).items():
            if self.coming.get(key) == turn:  # else it was freed on its way
                del self.coming[key]
                self.have[key] = (length, -1)

    def lost(self, turn: LaneTurn, packet: Packet) -> None:
        """A transfer failed."""
        self.failed.add(turn)
        if not isinstance(packet, Weights):
            self.send(m.TransferFailed(Incoming(turn, packet), "the lane broke"))
            return
        if not any(other == packet for turns in self.expected.values() for _, other in turns):
            self.forms.pop((packet.version, packet.base), None)
        self.shared.broken |= {lane_of(relayed) for relayed in self.relays.pop(packet, ())}
        self.send(m.FetchFailed(turn, packet, "the lane broke"))

    # ---- work

    def options(self) -> Iterator[Callable[[], None]]:
        """Everything that this worker could do next by itself."""
        if self.hung or self.role == "source":
            if not self.hung and not self.closed and sum(one.at_most == NO_LIMIT for one in self.offers.values()) < 2:
                yield self._offer
            return
        for job in self.jobs:
            needs = [key for row in job.rows for key in row.needs]
            if any(self._is_missing(key) for key in needs):
                yield partial(self.abandon, job, False, "its tensors did not come")
            elif job.begun >= 0 or all(key in self.have for key in needs):
                yield partial(self._finish if job.begun >= 0 or self.role != "rollout" else self._begin, job)
        is_evaluating = any(job.begun >= 0 and job.rows[0].exact >= 0 for job in self.jobs)
        if self.staged != self.applied and (not is_evaluating or self.shared.scenario.swaps_at_once):
            yield self._apply
        if self.unpublished is not None:
            yield self._publish
        # A trainer takes one micro-batch at a time: a prefetched "closed" would be void if this one did not come.
        requests = 1 if self.role == "trainer" else self.shared.scenario.capacity
        done = self.left or (self.leaving and self.role != "trainer")  # trainers finish the step that they are told
        if not (self.pulling or self.closed or done) and len(self.jobs) < requests:
            yield self._pull

    def _offer(self) -> None:
        scenario, rng, evals = self.shared.scenario, self.shared.rng, self.shared.evals_offered
        number, lengths = self.requests, (rng.randint(1, 6), rng.randint(1, 3))
        self.requests += 1
        if evals < scenario.exact_evals and rng.random() < 0.3:
            self.shared.evals_offered += 1
            version = min(max(self.shared.latest() + rng.randint(-1, 2), 0), scenario.steps)
            offer = m.Offer(
                request=number,
                flow="eval",
                prompts=(evals,),
                epoch=version,
                members=3,
                at_least=version,
                lengths=offered_lengths(*lengths),
                tags=(),
                at_most=version,
            )
        elif evals < scenario.evals and rng.random() < 0.5:
            self.shared.evals_offered += 1
            offer = m.Offer(
                request=number,
                flow="eval",
                prompts=(evals,),
                epoch=0,
                members=1,
                at_least=self.shared.latest(),
                lengths=offered_lengths(*lengths),
                tags=(),
            )
        else:
            at_once = scenario.prompts_at_once
            epoch, prompts, self.prompts = next_prompts(self.prompts, at_once, self.shared.passed)
            columns = offered_lengths(*lengths, prompts=len(prompts))
            offer = m.Offer(
                request=number,
                flow="train",
                prompts=prompts,
                epoch=epoch,
                members=scenario.members,
                at_least=0,
                lengths=columns,
                tags=(),
            )
        self.offers[number] = offer
        self.send(offer)

    def _pull(self) -> None:
        self.pulling = True
        self.requests += 1
        stage, step = ("train", self.step) if self.role == "trainer" else (self.role, -1)
        self.pull_request = self.requests
        self.send(
            m.Pull(
                request=self.requests,
                stage=stage,
                slots=self.shared.scenario.capacity - len(self.jobs),
                tokens=0,
                step=step,
            )
        )

    def _apply(self) -> None:
        self.applied = self.staged
        self.send(m.WeightsActivated(MODEL, self.applied))

    def _publish(self) -> None:
        assert self.unpublished is not None
        bases = [NO_BASE, *sorted(self.weights)[-1:]]
        forms = tuple(
            Weights(model=MODEL, version=self.unpublished, base=base, bucket_bytes=(8, 8), checksum=0) for base in bases
        )
        self.weights.add(self.unpublished)
        self.told[self.unpublished] += 1
        self.forms |= {(one.version, one.base): one for one in forms}
        self.send(m.Publish(forms, ()))
        self.unpublished = None

    def _begin(self, job: Job) -> None:
        if job.rows[0].exact not in (NO_VERSION, self.applied):
            self.abandon(job, False, "it has swapped its weights since")
            return
        job.begun = self.applied

    def _reward(self, row: Row) -> float:
        """Whether the prompt is solved, which does not depend on who scores it and when."""
        rate = self.shared.scenario.solve_rate
        if rate is None:
            return self.shared.rng.random()
        return float(random.Random(f"{row.epoch} {row.prompt} {row.member}").random() < rate)

    def _decisions(self, rows: list[Row]) -> tuple[float, ...]:
        """The decision on the group of each row, which depends on the rewards of all its samples."""
        of_group: dict[int, list[float]] = defaultdict(list)
        for row in rows:
            of_group[row.group].append(self.rewards[row.slot])
        return tuple(decision(of_group[row.group]) for row in rows)

    def _is_missing(self, key: Key) -> bool:
        """It was to come, and its transfer failed (perhaps for another job, which said so already)."""
        return key not in self.have and (key not in self.coming or self.coming[key] in self.failed)

    def withdraw(self) -> None:
        """It does not want to wait any longer; the grant may be on its way."""
        self.withdrawn.add(self.pull_request)
        self.send(m.CancelRequest(self.pull_request))

    def abandon(self, job: Job, lost: bool, reason: str) -> None:
        """Give a job back, or say that nobody can do it."""
        self.jobs.remove(job)
        slots, leases = tuple(row.slot for row in job.rows), tuple(row.lease for row in job.rows)
        self.send(m.ReleaseLease(stage=job.rows[0].stage, slots=slots, leases=leases, lost=lost, reason=reason))

    def _finish(self, job: Job) -> None:
        self.jobs.remove(job)
        if self.role == "trainer":
            self.trained += job.rows
            return
        if self.role == "evaluate":
            for row in job.rows:
                if row.exact >= 0:
                    assert set(row.spans[::2]) == {row.exact}, f"{row} is to be of version {row.exact}"
                    self.shared.evaluated[row.exact].append(row)
        self.requests += 1
        rng = self.shared.rng
        slots, leases = tuple(row.slot for row in job.rows), tuple(row.lease for row in job.rows)
        lengths = tuple(rng.randint(1, 9) for _ in slots)
        parts = tuple(Part(name, slots, lengths) for name in TENSORS_MADE.get(self.role, ()))
        spans: tuple[tuple[int, ...], ...] = ()
        if self.role == "rollout":
            before = rng.randint(0, lengths[0]) if job.begun != self.applied else lengths[0]
            both = (job.begun, before, self.applied, lengths[0] - before)
            spans = (both if 0 < before < lengths[0] else (job.begun, lengths[0]),)
        inline: tuple[Values, ...] = ()
        if self.role == "reward":
            inline = (Values("reward", tuple(map(self._reward, job.rows))),)
        elif self.role == "filter":
            inline = (Values(DECISION, self._decisions(job.rows)),)
        self.have.update({key: (length, self.requests) for key, length in keys_of(parts).items()})
        self.send(
            m.Commit(
                request=self.requests,
                stage=self.role,
                slots=slots,
                leases=leases,
                parts=parts,
                inline=inline,
                spans=spans,
            )
        )
