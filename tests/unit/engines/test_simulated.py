"""Simulated engines: times against formulas worked out by hand, on a clock that advances only in waits."""

import threading
from pathlib import Path

import pytest
import torch

from flowrt.controller.policies.dispatch.length_aware import completion_s
from flowrt.engines.base import Prompt, Response, TrainingBatch
from flowrt.engines.simulated.engine import SimulatedRollout, SimulatedScorer, SimulatedTrainer
from flowrt.engines.simulated.time import ManualSimClock, RealTimeSimClock, SimDevice
from flowrt.engines.simulated.workload import (
    GenerationCost,
    Lengths,
    LogNormal,
    ScoreCost,
    SimulatedDecoder,
    Trace,
    TrainCost,
    Uniform,
)
from flowrt.errors import ConfigError, EngineError
from flowrt.runtime.clock import DrivenClock
from flowrt.transport.weights.snapshot import Snapshot

COST = GenerationCost(base_s=0.02, per_row_s=0.005)  # flat up to four rows
NEVER = threading.Event()


def exactly(length: int) -> Lengths:
    return Lengths(Uniform(length, length))


def prompts(count: int, length: int = 10) -> list[Prompt]:
    return [Prompt(key, torch.full((length,), key, dtype=torch.int32), seed=key) for key in range(count)]


def run_to_end(engine: SimulatedRollout) -> list[Response]:
    responses = []
    while engine.running:
        responses += engine.run(NEVER)
    return responses


def test_the_time_of_a_decode_step_is_flat_and_then_linear() -> None:
    assert [COST.step_s(rows) for rows in (0, 1, 4, 5, 8)] == [0.0, 0.02, 0.02, 0.025, 0.04]


def test_the_time_of_a_batch_is_the_sum_of_its_shrinking_steps() -> None:
    lengths = [900, 100, 400, 400, 250, 30]
    decoder = SimulatedDecoder(COST)
    for key, length in enumerate(lengths):
        decoder.add(key, length)
    finished = decoder.advance(1e9)
    # 30 tokens of six, 70 of five, 150 of four, 150 of three (two end), 500 of one.
    by_hand = 30 * 0.03 + 70 * 0.025 + (150 + 150 + 500) * 0.02
    assert finished[-1].at_s == pytest.approx(by_hand, abs=1e-9)
    assert completion_s(lengths, COST.step_s) == pytest.approx(by_hand, abs=1e-9)
    assert [sequence.key for sequence in finished[:2]] == [5, 1]
    assert {sequence.key for sequence in finished[3:5]} == {2, 3}
    assert decoder.running == 0
    assert decoder.next_finish() == float("inf")


def test_the_formula_equals_the_simulated_time_of_any_batch() -> None:
    drawn = Lengths(LogNormal(200, 1.0, 4000), seed=3)
    for count in (1, 3, 17, 64):
        lengths = [drawn.draw(b"", sample) for sample in range(count)]
        decoder = SimulatedDecoder(COST)
        for key, length in enumerate(lengths):
            decoder.add(key, length)
        assert decoder.advance(1e9)[-1].at_s == pytest.approx(completion_s(lengths, COST.step_s), rel=1e-12)


def test_a_joining_sequence_slows_the_others_and_polling_changes_nothing() -> None:
    cost = GenerationCost(base_s=0.01, per_row_s=0.01)
    decoder = SimulatedDecoder(cost)
    decoder.add(0, 100)
    assert decoder.advance(0.5) == []  # 50 tokens
    decoder.add(1, 100)
    for tenth in range(6, 15):
        assert decoder.advance(tenth / 10) == []
    # The first has 50 tokens left at half the speed; then the second has 50 left at full speed.
    assert [(sequence.key, round(sequence.at_s, 9)) for sequence in decoder.advance(10.0)] == [(0, 1.5), (1, 2.0)]
    assert decoder.row_s == pytest.approx(0.5 + 2 * 1.0 + 0.5)


def test_a_prefill_stalls_all_rows_once_for_each_distinct_prompt() -> None:
    clock = DrivenClock()
    cost = GenerationCost(base_s=0.02, prefill_token_s=0.001)
    engine = SimulatedRollout(cost, exactly(50), ManualSimClock(clock), rows=4)
    same = torch.zeros(10, dtype=torch.int32)
    engine.add([Prompt(0, same, 1), Prompt(1, same, 2), Prompt(2, same + 1, 3)])
    assert len(run_to_end(engine)) == 3
    assert clock.now() == pytest.approx(2 * 10 * 0.001 + 50 * 0.02)


def test_a_run_is_repeatable_and_has_the_right_types_and_shapes() -> None:
    def run_once() -> tuple[list[tuple[int, int, tuple[int, ...]]], float]:
        clock = DrivenClock()
        engine = SimulatedRollout(COST, Lengths(LogNormal(100, 0.8, 1000), 0.5, 7), ManualSimClock(clock), rows=3)
        todo, responses = prompts(10), []
        while todo or engine.running:
            engine.add([todo.pop(0) for _ in range(min(engine.room, len(todo)))])
            responses += engine.run(NEVER)
        for response in responses:
            assert response.tokens.dtype == torch.int32
            assert response.logprobs.dtype == torch.float32
            assert len(response.tokens) == len(response.logprobs) == response.spans[1]
        return [(response.key, len(response.tokens), response.spans) for response in responses], clock.now()

    assert run_once() == run_once()
    assert sorted(key for key, _, _ in run_once()[0]) == list(range(10))


def test_more_prompts_than_rows_are_refused() -> None:
    engine = SimulatedRollout(COST, exactly(5), ManualSimClock(), rows=2)
    engine.add(prompts(2))
    assert (engine.room, engine.running) == (0, 2)
    with pytest.raises(EngineError, match="add at most `room` prompts"):
        engine.add(prompts(1))


def test_an_interrupt_wakes_a_waiting_engine() -> None:
    engine = SimulatedRollout(GenerationCost(base_s=100.0), exactly(1000), RealTimeSimClock(1.0), rows=1)
    engine.add(prompts(1))
    interrupt = threading.Event()
    waker = threading.Timer(0.05, interrupt.set)
    waker.start()
    assert engine.run(interrupt) == []
    waker.join()
    assert engine.running == 1


def test_an_engine_generates_between_polls() -> None:
    clock = DrivenClock()
    engine = SimulatedRollout(COST, exactly(50), ManualSimClock(clock), rows=1)
    engine.add(prompts(1))
    clock.advance(10.0)
    assert len(engine.run(NEVER)) == 1
    assert clock.now() == 10.0


def test_weights_are_loaded_between_sequences() -> None:
    clock = DrivenClock()
    engine = SimulatedRollout(GenerationCost(base_s=0.02, load_s=3.0), exactly(50), ManualSimClock(clock), rows=1)
    engine.add(prompts(1))
    with pytest.raises(EngineError, match="between sequences"):
        engine.swap(Snapshot.empty(1, [4]))
    run_to_end(engine)
    engine.swap(Snapshot.empty(1, [4]))
    assert clock.now() == pytest.approx(50 * 0.02 + 3.0)
    engine.add(prompts(1))
    assert run_to_end(engine)[0].spans == (1, 50)


def test_weights_swapped_in_flight_split_the_spans_and_stall_once() -> None:
    clock = DrivenClock()
    cost = GenerationCost(base_s=0.02, load_s=3.0)
    engine = SimulatedRollout(cost, exactly(50), ManualSimClock(clock), rows=2, in_flight=True)
    engine.add(prompts(1))
    clock.advance(20 * 0.02 + 0.001)
    engine.swap(Snapshot.empty(1, [4]))
    engine.swap(Snapshot.empty(2, [4]))  # no token was generated with version 1
    assert run_to_end(engine)[0].spans == (0, 20, 2, 30)
    assert clock.now() == pytest.approx(50 * 0.02 + 2 * 3.0)


def test_lengths_depend_on_the_prompt_and_on_the_sample() -> None:
    drawn = Lengths(LogNormal(500, 0.8, 10_000), correlation=0.6, seed=1)
    assert drawn.draw(b"a", 1) == drawn.draw(b"a", 1)
    assert len({drawn.draw(b"a", sample) for sample in range(20)}) > 10
    correlated = Lengths(LogNormal(500, 0.8, 10_000), correlation=1.0, seed=1)
    assert len({correlated.draw(b"a", sample) for sample in range(20)}) == 1
    # Two epochs of the same prompts: earlier lengths predict later ones.
    firsts = torch.tensor([float(drawn.draw(str(number).encode(), 2 * number)) for number in range(2000)]).log()
    seconds = torch.tensor([float(drawn.draw(str(number).encode(), 2 * number + 1)) for number in range(2000)]).log()
    assert float(torch.corrcoef(torch.stack([firsts, seconds]))[0, 1]) == pytest.approx(0.6, abs=0.05)


def test_distributions_have_their_quantiles(tmp_path: Path) -> None:
    assert LogNormal(600, 0.8, 3072).quantile(0.5) == 600
    assert LogNormal(600, 0.8, 3072).quantile(0.9999) == 3072
    assert [Uniform(3, 5).quantile(share) for share in (0.01, 0.5, 0.99)] == [3, 4, 5]
    path = tmp_path / "lengths.txt"
    path.write_text("30\n10\n20\n")
    assert [Trace.from_file(path).quantile(share) for share in (0.1, 0.5, 0.9)] == [10, 20, 30]
    path.write_text("ten\n")
    with pytest.raises(ConfigError, match="one whole number a line"):
        Trace.from_file(path)
    with pytest.raises(ConfigError, match="from 0 to 1"):
        Lengths(Uniform(1, 2), correlation=1.5)


def batch(*lengths: int) -> TrainingBatch:
    columns = [torch.zeros(length) for length in lengths]
    ones = torch.ones(len(lengths))
    return TrainingBatch(
        prompts=[torch.zeros(10)] * len(lengths),
        responses=columns,
        rollout_logprobs=columns,
        reference_logprobs=None,
        advantages_N=ones,
        weights_N=ones,
        groups_N=torch.zeros(len(ones), dtype=torch.int64),
    )


def test_the_time_of_a_training_step_does_not_depend_on_micro_batches() -> None:
    def train(*batches: TrainingBatch) -> float:
        clock = DrivenClock()
        trainer = SimulatedTrainer(TrainCost(0.001, optimizer_s=2.0), ManualSimClock(clock))
        for training_batch in batches:
            trainer.accumulate(training_batch)
        assert trainer.step() == {"trained_tokens": 630.0}
        return clock.now()

    assert train(batch(100, 200, 300)) == pytest.approx(2.63)
    assert train(batch(100), batch(200, 300)) == pytest.approx(2.63)
    assert TrainCost(0.001, pass_s=0.5, pass_tokens=100).accumulate(250) == pytest.approx(0.25 + 3 * 0.5)


def test_a_trainer_publishes_its_number_of_steps_as_weights() -> None:
    clock = DrivenClock()
    trainer = SimulatedTrainer(TrainCost(0.0, snapshot_s=1.5), ManualSimClock(clock), parameter_bytes=64)
    assert trainer.step() == {}
    trainer.accumulate(batch(5))
    trainer.step()
    snapshot = trainer.snapshot(1)
    assert (snapshot.version, sum(snapshot.bucket_bytes()), clock.now()) == (1, 64, 1.5)
    received = {"weight": torch.zeros(16)}
    snapshot.restore(received)
    assert received["weight"].tolist() == [1.0] * 16


def test_a_scorer_takes_the_configured_time() -> None:
    clock = DrivenClock()
    scorer = SimulatedScorer(ScoreCost(token_s=0.01, sample_s=1.0, pass_s=5.0, pass_samples=2), ManualSimClock(clock))
    responses = [torch.zeros(length) for length in (10, 20, 30)]
    assert [len(logprob) for logprob in scorer.logprobs([torch.zeros(5)] * 3, responses)] == [10, 20, 30]
    assert clock.now() == pytest.approx(2 * 5.0 + 3 * 1.0 + 75 * 0.01)
    assert scorer.rewards(responses) == [0.0, 0.0, 0.0]


class LateClock(ManualSimClock):
    """Every wait ends a hundredth of a second late."""

    def wait_until(self, at_s: float, interrupt: object = None) -> None:
        self.clock.advance(max(0.0, at_s - self.now()) + 0.01)


def test_late_wake_ups_do_not_accumulate() -> None:
    sim_clock = LateClock()
    device = SimDevice(sim_clock)
    for _ in range(100):
        device.work(1.0)
    assert sim_clock.now() == pytest.approx(100.01)


def test_real_time_is_scaled_and_does_not_drift() -> None:
    sim_clock = RealTimeSimClock(0.001)
    device, start_s = SimDevice(sim_clock), sim_clock.now()
    for _ in range(50):
        device.work(2.0)
    assert 100.0 <= sim_clock.now() - start_s < 300.0
