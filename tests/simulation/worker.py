"""A simulated worker: implements the protocol, stores keys in place of tensors, and works in any order.

What would fail in a real worker (a tensor that is neither present nor in flight, a gap in a lane, half a group) raises
AssertionError at the same moment.
"""

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec

from flowrt.client.session import MAX_PULL_ATTEMPTS
from flowrt.controller.events import Event, MessageReceived, WorkerConnected
from flowrt.controller.policies.group_filter import DECISION
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from flowrt.protocol.journals import SampleKey, journal_of
from flowrt.protocol.messages import NO_BASE, NO_LIMIT, NO_VERSION, Incoming, LaneTurn, Part, Values, Weights
from tests.simulation.rows import (
    Evaluation,
    Job,
    Key,
    LaneId,
    Packet,
    Row,
    Shared,
    Turns,
    Written,
    keys_of,
    lane_of,
    rows_of,
)
from tests.simulation.scenario import (
    COLUMNS,
    GROUP_COLUMNS,
    MODEL,
    OUTPUT_TENSORS,
    decision,
    next_prompts,
    offered_lengths,
)


def _key(row: Row) -> SampleKey:
    return SampleKey(row.epoch, row.prompt, row.member, row.attempt)


def _joined(kept: Written | None, spans: tuple[int, ...]) -> tuple[int, ...]:
    """The spans of a sample whose first tokens were kept."""
    return spans if kept is None else (*kept.spans, *spans)


class Worker:
    """One process of the cluster; the simulation chooses the order of its actions."""

    def __init__(self, worker: str, role: str, shared: Shared) -> None:
        self.id, self.role, self.shared, self.alive = WorkerId(worker), role, shared, True
        self.inbox: deque[m.Message] = deque()
        self.outbox: deque[Event] = deque([WorkerConnected(self.id, role, "host")])
        self.have: dict[Key, tuple[int, int]] = {}  # length, and the request of the commit that created it
        self.content: dict[Key, int] = {}  # the number of the commit that made it, by which copies are told apart
        self.coming: dict[Key, LaneTurn] = {}
        self.failed: set[LaneTurn] = set()
        self.failed_pulls: Counter[str] = Counter()  # in a row, by sender
        self.sequences: dict[LaneId, int] = {}
        self.expected: Turns = defaultdict(deque)
        self.weights: set[int] = set()
        self.downgrades: set[LaneTurn] = set()  # turns that carry an older version than the one in use
        self.reported: Counter[int] = Counter()  # reports of each version, less its evictions
        self.forms: dict[tuple[int, int], Weights] = {}  # full or as changes, present or in flight
        self.kept: Weights | None = None  # a part of these has come, and the rest may follow
        self.relays: dict[Weights, list[LaneTurn]] = defaultdict(list)  # turns that forward what is still in flight
        self.applied = 0
        self.staged = 0
        self.jobs: list[Job] = []
        self.pulling = False
        self.pull_request = -1
        self.withdrawn: set[int] = set()
        self.requests = 0
        self.prompts = 0  # number that the source has offered for training
        self.offers: dict[int, m.Offer] = {}
        self.closed = False  # no more data: of this step (trainer), of the run (source)
        self.step = 0
        self.trained: list[Row] = []
        self.hung = False  # serves transfers, but does no work
        self.leaving = self.left = False  # asked to drain; has stopped work
        self.terminated = False  # is to leave, because it has asked to or an operator has ordered it
        self.unpublished: int | None = None
        self.rewards: dict[int, float] = {}  # of the slots of the latest grant of each
        if role == "rollout":
            self.send(m.WeightsActivated(MODEL, 0))

    @property
    def is_new(self) -> bool:
        """Whether it has not joined yet."""
        return any(isinstance(event, WorkerConnected) and not event.term for event in self.outbox)

    def send(self, message: m.Message) -> None:
        self.outbox.append(MessageReceived(self.id, message))

    # ---- commands of the controller

    def receive(self, message: m.Message) -> None:  # noqa: C901 - one case for each message
        match message:
            case m.Grant():
                self._granted(message)
            case m.OfferAccepted(request, group):
                offer = self.offers.pop(request)
                if offer.at_most == NO_LIMIT:
                    self.closed = self.closed or group < 0
                elif group >= 0:
                    self.shared.evaluations[group] = Evaluation(self.id, offer.at_most, offer.members)
                for column in offer.lengths if group >= 0 else ():
                    for item, length in enumerate(column.lengths, group):
                        self.have[column.column, item] = (length, -1)
            case m.Rejected(request) if request in self.offers:
                self._rejected(self.offers.pop(request), message.reason)
            case m.Rejected(request):
                assert request in self.withdrawn or self.leaving, f"{self.id} was refused: {message.reason}"
                self._close_request(request)
                self.left = request not in self.withdrawn
                if self.left:
                    self.trained.clear()  # of a step that is abandoned
            case m.Drain():
                self.leaving = True
            case m.Committed(request, refused):
                # The slot may have been regenerated here since: delete only the tensors of this commit.
                created = [key for key, (_, by) in self.have.items() if by == request and key[1] in refused]
                for key in created:
                    del self.have[key]
            case m.ReleaseTensors(columns, slots, groups):
                self._free(columns, slots, groups)
            case m.Stop():
                assert self.leaving, f"{self.id} is stopped, but was not asked to drain"
                assert not self.jobs, f"{self.id} is stopped, but works on {self.jobs}"
                self.send(m.Leave(""))
            case m.SendSamples(turn, parts):
                self._must_have(keys_of(parts), turn)
                self.shared.payloads[turn] = {key: self.content.get(key, -1) for key in keys_of(parts)}
                self._issue(turn, parts, self.shared.sent)
            case m.SendWeights():
                self._serve_weights(message)
            case m.GroupsDropped():
                pass  # followed by the order to free its columns
            case m.ReceiveWeights():
                self._receive_weights(message)
            case m.EvictVersion(_, version):
                # A version that was fetched twice may be evicted in between: the second report is still in flight.
                assert self.reported[version], f"{self.id} has to evict version {version}, but has {self.weights}"
                self.reported[version] -= 1
                self.weights.discard(version)
                self.forms = {form: weights for form, weights in self.forms.items() if form[0] != version}
            case _:
                raise AssertionError(f"{self.id} was sent {message}")

    def _free(self, columns: Sequence[str], slots: Sequence[int], groups: Sequence[int]) -> None:
        for name in columns or [column.name for column in COLUMNS]:
            for item in groups if name in GROUP_COLUMNS else slots:
                self.have.pop((name, item), None)
                self.coming.pop((name, item), None)
        for group in groups if self.role == "source" else ():
            if group in self.shared.evaluations and self.shared.evaluations[group].source == self.id:
                self.shared.evaluations[group].is_closed = True
        # Work on a slot without its tensors has no lease any more.
        self._keep(lambda row: all(key in self.have or key in self.coming for key in row.needs))

    def _rejected(self, offer: m.Offer, reason: str) -> None:
        """Another source has offered the prompts."""
        is_offered = self.shared.scenario.sources > 1 and "offered" in reason
        assert is_offered, f"{self.id} was refused {offer}: {reason}"

    def _receive_weights(self, order: m.ReceiveWeights) -> None:
        weights = order.weights
        assert not order.first or self.kept == weights, f"{self.id} has no part of {weights} to go on from"
        if self.kept is not None and not order.first:
            self._fail_relays(self.kept)
        self.kept = None
        self.downgrades.update([order.turn] if order.older else ())
        based = weights.base == NO_BASE or weights.base in self.weights
        assert based, f"{self.id} is sent changes to {weights.base}, but has {self.weights}"
        self.forms[weights.version, weights.base] = weights
        self._issue(order.turn, weights, self.expected)

    def _serve_weights(self, order: m.SendWeights) -> None:
        weights = self.forms.get((order.version, order.base))
        if weights is not None and order.version in self.weights:
            self._issue(order.turn, weights, self.shared.sent)
            return
        self._skip(order.turn)
        if weights is not None:
            self.relays[weights].append(order.turn)
        else:  # its own fetch has failed; the report is in flight
            assert any(turn.kind == "weights" for turn in self.failed), f"{self.id} was never sent {order}"
            self.shared.broken.add(lane_of(order.turn))

    def _must_have(self, keys: dict[Key, int], turn: LaneTurn) -> None:
        for key, length in keys.items():
            state = "it is still in flight" if key in self.coming else "it is not present"
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

    def _close_request(self, request: int) -> None:
        assert request == self.pull_request, f"{self.id} got a reply to request {request}, which is not open"
        self.pulling, self.pull_request = False, -1

    def _granted(self, grant: m.Grant) -> None:
        self._close_request(grant.request)
        self.closed = self.closed or grant.closed
        for incoming in grant.incoming:
            for key in keys_of(incoming.parts):
                self.have.pop(key, None)
                self.coming[key] = incoming.turn
            self._issue(incoming.turn, incoming.parts, self.expected)
        for key, length in keys_of(grant.parts).items():
            known = key in self.coming or self.have.get(key, (-1,))[0] == length
            assert known, f"{self.id} was granted slots {grant.slots}, but {key} is neither present nor in flight"
        columns = {column.column: column.values for column in grant.inline}
        self.rewards.update(zip(grant.slots, columns.get("reward", ()), strict=False))
        rows = list(rows_of(grant, "train" if self.role == "trainer" else self.role))
        # The old lease of a slot that is granted again has ended.
        self._keep(lambda row: row.slot not in grant.slots)
        if self.role == "rollout":
            self.jobs += [Job([row], kept=self._find_kept(row)) for row in rows]
        elif rows:
            self.jobs.append(Job(rows))

    def _keep(self, valid: Callable[[Row], bool]) -> None:
        if self.role == "trainer":
            # A batch of whole groups is trained completely or not at all.
            for job in [job for job in self.jobs if not all(map(valid, job.rows))]:
                self.abandon(job, False, "a part of it is void")
            return
        for job in self.jobs:
            job.rows = [row for row in job.rows if valid(row)]
        self.jobs = [job for job in self.jobs if job.rows]

    # ---- lanes

    def arrived(self, turn: LaneTurn, packet: Packet) -> None:
        """A transfer is complete."""
        if isinstance(packet, Weights):
            self.weights.add(packet.version)
            self.forms[packet.version, NO_BASE] = msgspec.structs.replace(packet, base=NO_BASE)
            self.staged = packet.version if turn in self.downgrades else max(self.staged, packet.version)
            for relayed in self.relays.pop(packet, ()):
                self.shared.sent[lane_of(relayed)].append((relayed, packet))
            self.reported[packet.version] += 1
            self.send(m.WeightsStaged(MODEL, packet.version))
            return
        payload = self.shared.payloads.pop(turn)
        for key, length in keys_of(packet).items():
            self.content[key] = payload[key]
            if self.coming.get(key) == turn:  # else it was released in flight
                del self.coming[key]
                self.have[key] = (length, -1)

    def lost(self, turn: LaneTurn, packet: Packet) -> None:
        """A transfer failed."""
        self.failed.add(turn)
        if not isinstance(packet, Weights):
            self.send(m.TransferFailed(Incoming(turn, packet), "the lane broke"))
            return
        is_expected = any(other == packet for turns in self.expected.values() for _, other in turns)
        if not is_expected and turn.incarnation % 2:
            self.kept = packet  # its relays wait
        else:
            self._fail_relays(packet, keep_form=is_expected)
        self.send(m.FetchFailed(turn, packet, "the lane broke", int(self.kept == packet)))

    def _fail_relays(self, packet: Weights, *, keep_form: bool = False) -> None:
        """The rest of a version will not come, here and at those to which it is relayed."""
        if not keep_form:
            self.forms.pop((packet.version, packet.base), None)
        self.shared.broken |= {lane_of(relayed) for relayed in self.relays.pop(packet, ())}

    # ---- work

    def options(self) -> Iterator[Callable[[], None]]:
        """All actions that this worker could take next."""
        if self.role == "source" and self.shared.scenario.source_kills and self.is_new:
            return  # its welcome has the prompts that it must not offer
        if self.hung or self.role == "source":
            if (
                not self.hung
                and not self.closed
                and sum(offer.at_most == NO_LIMIT for offer in self.offers.values()) < 2
            ):
                yield self._offer
            return
        for job in self.jobs:
            needs = [key for row in job.rows for key in row.needs]
            if any(self._is_missing(key) for key in needs):
                yield partial(self._lose, job)
            elif job.begun >= 0 or all(key in self.have for key in needs):
                yield partial(self._finish if job.begun >= 0 or self.role != "rollout" else self._begin, job)
        is_evaluating = any(job.begun >= 0 and job.rows[0].exact >= 0 for job in self.jobs)
        if self.staged != self.applied and (not is_evaluating or self.shared.scenario.swaps_at_once):
            yield self._apply
        if self.unpublished is not None:
            yield self._publish
        # A trainer pulls one micro-batch at a time: a prefetched "closed" would be void if this one failed.
        requests = 1 if self.role == "trainer" else self.shared.scenario.capacity
        done = self.left or (self.leaving and self.role != "trainer")  # trainers finish their step
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

    def terminate(self) -> None:
        """The process is told to end, and asks to leave in order."""
        self.terminated = True
        self.send(m.Drain(0, self.id))

    def _publish(self) -> None:
        assert self.unpublished is not None
        bases = [NO_BASE, *sorted(self.weights)[-1:]]
        forms = tuple(
            Weights(model=MODEL, version=self.unpublished, base=base, bucket_bytes=(8, 8), checksum=0) for base in bases
        )
        self.weights.add(self.unpublished)
        self.reported[self.unpublished] += 1
        self.forms |= {(form.version, form.base): form for form in forms}
        self.send(m.Publish(forms, ()))
        self.unpublished = None

    def _begin(self, job: Job) -> None:
        if job.rows[0].exact not in (NO_VERSION, self.applied):
            self.abandon(job, False, "it has swapped its weights since")
            return
        job.begun = self.applied
        if self._journal is not None and self.shared.rng.random() < 0.7:  # else it is killed before it is written
            self._journal[_key(job.rows[0])] = Written(_joined(job.kept, (job.begun, 1)), is_complete=False)

    @property
    def _journal(self) -> dict[SampleKey, Written] | None:
        """The journal of this worker and of those that had its name before."""
        journals = self.shared.scenario.journals
        return self.shared.journals[journal_of(journals, self.id)] if journals else None

    def _find_kept(self, row: Row) -> Written | None:
        """What the journal of the grant has of a sample; some journals are damaged."""
        if not row.kept or self.shared.rng.random() < 0.1:
            return None
        journals = [self.shared.journals[name] for name in row.kept.splitlines()]
        candidates = [journal[_key(row)] for journal in journals if _key(row) in journal]
        kept = max(candidates, key=lambda sample: (sample.is_complete, sum(sample.spans[1::2])), default=None)
        if kept is not None:
            self.shared.taken["complete" if kept.is_complete else "prefix"] += 1
        return kept

    def _reward(self, row: Row) -> float:
        """The reward of a row: with a solve rate it does not depend on the worker or the time."""
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
        """Whether its transfer failed (perhaps for another job, which has reported it already)."""
        return key not in self.have and (key not in self.coming or self.coming[key] in self.failed)

    def withdraw(self) -> None:
        """Cancel the pull; the grant may be in flight."""
        self.withdrawn.add(self.pull_request)
        self.send(m.CancelRequest(self.pull_request))

    def _lose(self, job: Job) -> None:
        """Give up a job whose tensors did not come. A trainer ends if those of one worker fail too often in a row."""
        missing = {key for row in job.rows for key in row.needs if self._is_missing(key)}
        self.failed_pulls.update({self.coming[key].sender for key in missing if key in self.coming})
        most = max(self.failed_pulls.values(), default=0)
        is_over = self.shared.broken_links and self.role == "trainer" and most >= MAX_PULL_ATTEMPTS
        assert not is_over, f"{self.id} exits: its tensors did not come, {self.failed_pulls} times"
        self.abandon(job, False, "its tensors did not come")

    def abandon(self, job: Job, lost: bool, reason: str) -> None:
        """Release the leases of a job; ``lost``: its samples cannot be produced."""
        self.jobs.remove(job)
        slots, leases = tuple(row.slot for row in job.rows), tuple(row.lease for row in job.rows)
        self.send(m.ReleaseLease(stage=job.rows[0].stage, slots=slots, leases=leases, lost=lost, reason=reason))

    def _finish(self, job: Job) -> None:
        self.jobs.remove(job)
        self.failed_pulls.clear()
        if self.role == "trainer":
            for row in job.rows:
                self._check_content(row)
            self.trained += job.rows
            return
        if self.role == "evaluate":
            for row in job.rows:
                if row.exact >= 0:
                    assert set(row.spans[::2]) == {row.exact}, f"{row} is to be of version {row.exact}"
                    self.shared.answers[row.group][row.slot] = row  # the latest counts: a commit may be refused
        self.requests += 1
        rng = self.shared.rng
        slots, leases = tuple(row.slot for row in job.rows), tuple(row.lease for row in job.rows)
        lengths = tuple(rng.randint(1, self.shared.scenario.longest) for _ in slots)
        parts = tuple(Part(name, slots, lengths) for name in OUTPUT_TENSORS.get(self.role, ()))
        spans: tuple[tuple[int, ...], ...] = ()
        if self.role == "rollout":
            before = rng.randint(0, lengths[0]) if job.begun != self.applied else lengths[0]
            both = (job.begun, before, self.applied, lengths[0] - before)
            span: tuple[int, ...] = both if 0 < before < lengths[0] else (job.begun, lengths[0])
            if job.kept is not None:
                span = job.kept.spans if job.kept.is_complete else _joined(job.kept, span)
            spans, lengths = (span,), (sum(span[1::2]),)
            parts = tuple(Part(name, slots, lengths) for name in OUTPUT_TENSORS[self.role])
            if self._journal is not None:
                self._journal[_key(job.rows[0])] = Written(span, is_complete=True)
        inline: tuple[Values, ...] = ()
        if self.role == "reward":
            inline = (Values("reward", tuple(map(self._reward, job.rows))),)
        elif self.role == "filter":
            inline = (Values(DECISION, self._decisions(job.rows)),)
        self.have.update({key: (length, self.requests) for key, length in keys_of(parts).items()})
        self._note_content(parts, spans)
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

    def _note_content(self, parts: tuple[Part, ...], spans: tuple[tuple[int, ...], ...]) -> None:
        """Number the tensors of a commit, and note the spans of a response, or from which response they are made."""
        self.shared.contents += 1
        content = self.shared.contents
        self.content.update(dict.fromkeys(keys_of(parts), content))
        for part in parts[:1]:
            for slot, span in zip(part.ids, spans, strict=False):
                self.shared.spans[content, slot] = span
            if not spans:
                self.shared.response_of |= {(content, slot): self.content["response", slot] for slot in part.ids}

    def _check_content(self, row: Row) -> None:
        """All columns of a sample that is trained are of the same response."""
        content = {column: self.content[column, row.slot] for column, _ in row.needs if column not in GROUP_COLUMNS}
        response = content["response"]
        assert content["logprobs"] == response, f"{row} has the response of one sample and the logprobs of another"
        assert self.shared.spans[response, row.slot] == row.spans, f"{row} has the response of another sample"
        if "ref_logprobs" in content:
            of_response = self.shared.response_of[content["ref_logprobs"], row.slot]
            assert of_response == response, f"{row} has the response of one sample and the ref_logprobs of another"
