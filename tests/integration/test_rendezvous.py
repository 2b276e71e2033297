"""Rendezvous of ranks on several hosts without pickles; an excess host is rejected."""

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from flowrt.ranks import rendezvous
from tests.integration.conftest import Launch
from tests.integration.helpers import rendezvous_agent
from tests.integration.helpers.forked_flowrt import forks

HOSTS = 2
SMALL = [
    *("--steps", "2", "--prompts-per-step", "4", "--group-size", "2", "--rollout.max-new-tokens", "4"),
    *("--sft.steps", "0", "--data.eval-prompts", "0", "--checkpoint.every", "1"),
    *("--build.hidden-size", "32", "--build.layers", "1", "--build.heads", "2", "--build.intermediate-size", "64"),
]
RUN_TWICE = 'sh -c \'"$$@" & exec "$$@"\' sh'


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


def test_hosts_are_ranked_and_an_excess_host_is_rejected(store: TCPStore) -> None:
    handlers = [
        rendezvous.CountingRendezvous(host="127.0.0.1", port=store.port, hosts=HOSTS, run_id="trainer", deadline_s=20.0)
        for _ in range(HOSTS + 1)
    ]
    infos = [handler.next_rendezvous() for handler in handlers[:HOSTS]]
    assert [(info.rank, info.world_size) for info in infos] == [(0, HOSTS), (1, HOSTS)]
    stores = [info.bootstrap_store_info for info in infos]
    assert {bootstrap.master_port for bootstrap in stores if bootstrap is not None} == {store.port}
    assert None not in stores
    with pytest.raises(RendezvousClosedError, match="2 hosts have already joined"):
        handlers[HOSTS].next_rendezvous()


def test_torchruns_of_two_hosts_start_all_ranks_and_store_no_pickle(store: TCPStore, tmp_path: Path) -> None:
    program = tmp_path / "rank.py"
    program.write_text(
        "import os, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "open(os.path.join(os.environ['PLACE'], os.environ['RANK']), 'w').write(os.environ['WORLD_SIZE'])\n"
    )
    arguments = ["--nnodes", str(HOSTS), "--rdzv-backend", rendezvous.COUNTING]
    arguments += ["--rdzv-endpoint", f"127.0.0.1:{store.port}", "--rdzv-id", "trainer", str(program)]
    environment = {**os.environ, "PLACE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", rendezvous_agent.__name__, "--nproc-per-node"]
    with (tmp_path / "output").open("wb") as output:
        started = [forks().start([*words, ranks, *arguments], environment, output.fileno()) for ranks in ("2", "1")]
    assert [forks().exit_code(pid, 120.0) for pid in started] == [0, 0], (tmp_path / "output").read_text()
    assert {path.name: path.read_text() for path in tmp_path.glob("[0-9]")} == {str(rank): "3" for rank in range(3)}
    keys = store.list_keys()
    assert keys
    for key in keys:
        value = store.get(key)
        assert not value.startswith((b"\x80", b"gA")), f"{key} holds a pickle: {value!r}"  # plain, or in base64


@pytest.mark.long
@pytest.mark.slow
def test_a_run_completes_with_its_trainer_on_two_hosts(launch: Callable[..., Launch]) -> None:
    run = launch(*SMALL, "--trainer.ranks", "2", "--trainer.nodes", "2", "--launch.trainer", RUN_TWICE)
    run.wait_for(lambda: run.find("flowrt.roles.trainer"), "trainer")
    [store_process] = run.find("flowrt.ranks.rendezvous")
    assert {connection.laddr.ip for connection in store_process.net_connections() if connection.status == "LISTEN"} == {
        "127.0.0.1"
    }
    assert run.wait(150.0) == 0, run.output + run.log("trainer")
    run.assert_gone(10.0)
