"""Best weights whose writer is killed at a random time: those in best.json are complete and of their version."""

import random
from pathlib import Path

import pytest
import torch

from flowrt.engines.hf import load_model, named_parameters
from flowrt.recipes.run_dir import best_dir, best_steps
from flowrt.roles.best_weights import Listed, read_list, to_keep
from flowrt.transport.weights.snapshot import Snapshot
from tests.integration.conftest import prepare
from tests.integration.helpers.best_writer import weights_of, write_all
from tests.integration.helpers.forked import CONTEXT

KILLS = 3
WRITE_TIMEOUT_S = 300.0


@pytest.mark.slow
def test_listed_weights_are_complete_after_their_writer_is_killed(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    model = prepare(prepared, steps=0)
    run_dir, rng, newest = tmp_path / "run", random.Random(0), 0
    run_dir.mkdir()
    layout = named_parameters(load_model(model))
    for _ in range(KILLS):
        written, end = CONTEXT.Pipe(duplex=False)
        child = CONTEXT.Process(target=write_all, args=(run_dir, model, newest, end), daemon=True)
        child.start()
        end.close()
        for _ in range(rng.randint(1, 3)):
            assert written.poll(WRITE_TIMEOUT_S), "the writer has failed"
            written.recv()
        # Killed at a random time during the next write.
        child.join(rng.random() * 0.05)
        assert child.is_alive(), "the writer has failed"
        child.kill()
        child.join()
        child.close()
        written.close()
        [version] = best_steps(run_dir)
        assert version > newest
        newest = version
        [listed] = read_list(run_dir)
        snapshot = Snapshot.take(version, named_parameters(load_model(best_dir(run_dir, version))))
        assert snapshot.checksum() == listed.checksum == Snapshot.take(version, weights_of(layout, version)).checksum()


def test_best_weights_up_to_the_newest_checkpoint_are_kept_for_a_resume() -> None:
    listed = [Listed(4, 0.5, 0), Listed(2, 0.6, 0), Listed(8, 0.9, 0), Listed(6, 0.4, 0)]
    assert [weights.version for weights in to_keep(listed, 1, saved_step=6)] == [8, 2]
    assert [weights.version for weights in to_keep(listed, 1, saved_step=8)] == [8]
    assert [weights.version for weights in to_keep(listed, 2, saved_step=4)] == [8, 2, 4]
