"""The cost of an event does not grow with the slots, the workers or the requests that wait: operations are counted."""

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import pytest
from control_plane.core_costs import (
    REWARDS,
    SOURCE_WORKER,
    TRAINER_WORKER,
    Run,
    Size,
    loaded_run,
    receivers_only,
    steps,
)

from flowrt.controller.events import Command, MessageReceived, PreemptRun, Send, Tick, WorkerDisconnected
from flowrt.controller.policies.weight_sync import DelayedUpdate, Divergence, EveryN, Rolling, WeightSyncPolicy
from flowrt.controller.state.opened_prompts import MAX_EPOCHS, OpenedPrompts
from flowrt.controller.state.weight_arrivals import Arrivals
from flowrt.ids import REWARD, ROLLOUT, SOURCE, WorkerId
from flowrt.protocol import messages as m
from flowrt.protocol.messages import ColumnLengths, Message

FEW, MANY = Size(16, 1024, step_groups=16), Size(64, 4096, step_groups=16)
SAME = 1.25
"""The most by which the operations of an event may grow with the size of the run."""
LAST = WorkerId(f"{ROLLOUT}1")


def operations(act: Callable[[], object]) -> int:
    """The number of bytecode instructions that a call executes."""
    count, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


def assert_flat(cost: Callable[[Size], int]) -> None:
    few, many = cost(FEW), cost(MANY)
    assert many < SAME * few, f"{few} operations with {FEW}, {many} with {MANY}"


def sent(commands: Iterable[Command], kind: type[Message]) -> list[Message]:
    return [command.message for command in commands if isinstance(command, Send) and isinstance(command.message, kind)]


def drained(run: Run, worker: WorkerId) -> None:
    """Let a worker give its leases back and ask to leave; it has samples that no other worker has."""
    for lease in run.core.state.table.leases_of(worker):
        slots, leases = tuple(lease.slots), (lease.id,) * len(lease.slots)
        run.send(worker, m.ReleaseLease(stage="rollout", slots=slots, leases=leases, lost=False, reason=""))
    run.send(worker, m.Drain(0, worker))


# ---- slots and workers


def test_a_death() -> None:
    def cost(size: Size) -> int:
        run = loaded_run(size)
        return operations(lambda: run.event(WorkerDisconnected(LAST, "killed")))

    assert_flat(cost)


def test_a_tick_while_workers_drain() -> None:
    def cost(size: Size) -> int:
        run = loaded_run(size)
        for number in range(4):
            drained(run, WorkerId(f"{ROLLOUT}{number}"))
        run.event(Tick())  # which looks at every worker, once in a worker timeout
        assert len(run.core.state.membership.draining()) == 4
        return operations(lambda: run.event(Tick()))

    assert_flat(cost)


def test_a_message_while_the_run_is_preempted() -> None:
    def cost(size: Size) -> int:
        run = loaded_run(size)
        run.event(PreemptRun("the time limit", 1))
        return operations(lambda: run.send(LAST, m.Heartbeat(0.0, 0.0, 0.0)))

    assert_flat(cost)


def test_the_first_pull_and_the_end_of_a_step() -> None:
    def costs(size: Size) -> tuple[int, int]:
        run = loaded_run(size)
        steps(run, 1)
        pull = m.Pull(request=run.number(), stage="train", slots=0, tokens=0, step=1)
        first = operations(lambda: run.send(TRAINER_WORKER, pull))
        while run.pull(TRAINER_WORKER, "train", 0, 1) is not None:
            pass
        end = MessageReceived(TRAINER_WORKER, m.StepCompleted(1, ()))
        return first, operations(lambda: run.event(end))

    (few_first, few_end), (many_first, many_end) = costs(FEW), costs(MANY)
    assert many_first < SAME * few_first
    assert many_end < SAME * few_end


def test_a_member_that_joins_or_completes_its_role() -> None:
    def cost(size: Size) -> int:
        run = loaded_run(size)
        joined = operations(lambda: run.join(WorkerId("new"), REWARD))
        return joined + operations(lambda: run.send(LAST, m.RoleCompleted()))

    assert_flat(cost)


def test_a_death_with_a_large_evaluation() -> None:
    def cost(prompts: int) -> int:
        run = loaded_run(FEW)
        assert sent(run.send(SOURCE_WORKER, evaluation_of(run, range(prompts))), m.OfferAccepted)
        return operations(lambda: run.event(WorkerDisconnected(WorkerId(f"{REWARD}{REWARDS - 1}"), "killed")))

    assert cost(256) < SAME * cost(16)


# ---- offers


def evaluation_of(run: Run, prompts: Iterable[int], version: int = 0) -> m.Offer:
    numbers = tuple(prompts)
    return m.Offer(
        request=run.number(),
        flow="eval",
        prompts=numbers,
        epoch=0,
        members=1,
        at_least=version,
        lengths=(ColumnLengths("prompt", (100,) * len(numbers)),),
        tags=(),
        at_most=version,
    )


def test_an_offer_of_an_evaluation_next_to_a_large_one() -> None:
    def cost(prompts: int) -> int:
        run = loaded_run(FEW)
        assert sent(run.send(SOURCE_WORKER, evaluation_of(run, range(prompts))), m.OfferAccepted)
        offer = evaluation_of(run, [prompts])
        return operations(lambda: run.send(SOURCE_WORKER, offer))

    assert cost(256) < SAME * cost(16)


def test_an_event_while_offers_are_parked() -> None:
    def cost(offers: int) -> int:
        run = loaded_run(FEW)
        for number in range(offers):  # of a version that is not published yet
            assert not run.send(SOURCE_WORKER, evaluation_of(run, [number], version=5))
        run.core.state.work.add_offers()
        return operations(lambda: run.send(LAST, m.Heartbeat(0.0, 0.0, 0.0)))

    assert cost(512) < SAME * cost(16)


def test_a_large_offer_that_waits_is_not_examined_at_each_event() -> None:
    def cost(prompts: int) -> int:
        run = loaded_run(FEW)
        assert not run.send(SOURCE_WORKER, evaluation_of(run, range(prompts), version=5))
        run.core.state.work.add_offers()
        return operations(lambda: run.send(LAST, m.Heartbeat(0.0, 0.0, 0.0)))

    assert cost(512) < SAME * cost(16)


@pytest.mark.parametrize("backwards", [False, True])
def test_opened_prompts_do_not_grow_with_the_epochs(backwards: bool) -> None:
    opened, prompts = OpenedPrompts(), range(1000)
    for epoch in range(10 * MAX_EPOCHS):
        opened.add(epoch, reversed(prompts) if backwards else prompts)
    words = sum(map(len, opened._words.values()))
    assert words == MAX_EPOCHS * len({prompt // m.WORD_BITS for prompt in prompts})
    for epoch in (0, 10 * MAX_EPOCHS - 1):
        assert opened.among(epoch, [3, 999]) == [3, 999]
    assert opened.among(10 * MAX_EPOCHS, [3, 999]) == []


def test_a_prompt_of_an_old_epoch_can_be_unread_again() -> None:
    opened = OpenedPrompts()
    for epoch in range(10 * MAX_EPOCHS):
        opened.add(epoch, (7, 8))
    opened.discard(1, 7)
    assert opened.among(1, [7, 8]) == [8]
    opened.add(1, (7,))
    assert opened.among(1, [7, 8]) == [7, 8]
    assert not opened._unread


# ---- weights


def orders_to_fetch(commands: Iterable[Command]) -> list[m.ReceiveWeights]:
    messages = [command.message for command in commands if isinstance(command, Send)]
    return [command for command in messages if isinstance(command, m.ReceiveWeights)]


@pytest.mark.parametrize("weight_sync", [Rolling(4), DelayedUpdate(), EveryN(1), Divergence(-1.0, 3)])
def test_a_version_for_each_receiver(weight_sync: WeightSyncPolicy) -> None:
    def cost(workers: int) -> float:
        run = receivers_only(workers, weight_sync)
        run.fetch_all(run.publish())
        return operations(lambda: run.fetch_all(run.publish())) / workers

    assert cost(128) < SAME * cost(32)


def test_a_receiver_that_fails_and_one_that_dies() -> None:
    def costs(workers: int) -> tuple[int, int]:
        run = receivers_only(workers, DelayedUpdate())
        *_, other, last = orders_to_fetch(run.publish())
        failed = m.FetchFailed(last.turn, last.weights, "the lane broke")
        failure = operations(lambda: run.send(WorkerId(last.turn.receiver), failed))
        return failure, operations(lambda: run.event(WorkerDisconnected(WorkerId(other.turn.receiver), "killed")))

    (few_failure, few_death), (many_failure, many_death) = costs(32), costs(256)
    assert many_failure < SAME * few_failure
    assert many_death < SAME * few_death


def test_a_receiver_that_is_done_while_another_has_a_part() -> None:
    def cost(workers: int) -> int:
        run = receivers_only(workers, DelayedUpdate())
        first, *_, last = orders_to_fetch(run.publish())
        receiver = WorkerId(last.turn.receiver)
        [again] = orders_to_fetch(run.send(receiver, m.FetchFailed(last.turn, last.weights, "cut", received=1)))
        run.send(receiver, m.FetchFailed(again.turn, again.weights, "cut", received=1))  # now it waits
        assert run.core.state.models.policy.resumable
        staged = m.WeightsStaged(first.weights.model, first.weights.version)
        return operations(lambda: run.send(WorkerId(first.turn.receiver), staged))

    assert cost(256) < SAME * cost(32)


def test_a_death_with_many_lanes() -> None:
    def cost(pairs: int) -> int:
        run = receivers_only(4, DelayedUpdate())
        for number in range(pairs):
            run.core.state.lanes.next_turn(WorkerId(f"{SOURCE}{number}"), WorkerId(f"{REWARD}{number}"), "samples")
        return operations(lambda: run.event(WorkerDisconnected(LAST, "killed")))

    assert cost(512) < SAME * cost(8)


def test_only_a_fetch_that_is_much_slower_than_others_is_late() -> None:
    arrivals = Arrivals()
    names = [WorkerId(f"{ROLLOUT}{number}") for number in range(8)]
    for name in names:
        arrivals.begin(name, 100, 0.0)
    for at_s, name in enumerate(names[:6]):
        arrivals.arriving(name, 10.0 + at_s)
    assert arrivals.late_s == 1.5 * 13 + 1
    assert arrivals.take_late(20.0, lambda _: names[0]) == []
    below = {names[6]: names[0], names[7]: names[6]}
    assert arrivals.take_late(30.0, below.get) == [names[6]]  # the other one waits for it
    assert arrivals.take_late(100.0, below.get) == []  # it was stopped before
    arrivals.begin_version()
    assert arrivals.late_s == float("inf")


def test_a_late_receiver_is_ordered_to_stop_and_goes_on_with_another_source() -> None:
    run = receivers_only(8, DelayedUpdate())
    orders = orders_to_fetch(run.publish())
    for at_s, order in enumerate(orders[:7], 1):
        run.now = at_s / 2
        run.send(WorkerId(order.turn.receiver), m.WeightsArriving(order.turn, "policy"))
    run.now = 20.0
    late = orders[7].turn
    assert run.event(Tick()) == [Send(WorkerId(late.receiver), m.StopFetch(late))]
    failed = m.FetchFailed(late, orders[7].weights, "it is slow", received=12)
    commands = run.send(WorkerId(late.receiver), failed)
    (receive,) = orders_to_fetch(commands)
    (send,) = sent(commands, m.SendWeights)
    assert receive.first == 12
    assert send == m.SendWeights(receive.turn, "policy", 1, receive.weights.base, first=12)
    assert receive.turn.sender != late.sender
