"""One process of a simulated cluster, a child of a bench, for one run after another.

python bench/end_to_end/simulated/process.py controller    answers "play" with the address, then with the summary
python bench/end_to_end/simulated/process.py WORKER ...    answers "work" with the errors of the workers
"""

import asyncio
import json
import sys
from pathlib import Path

import torch
from common.children import reply
from end_to_end.simulated.modes import RunSpec
from end_to_end.simulated.roles import ROLES

from flowrt.client.session import Session, connect
from flowrt.controller.core import Core
from flowrt.controller.server.server import Server
from flowrt.errors import FlowError, Stopped
from flowrt.recipes import grpo
from flowrt.runtime.event_loop import run_loop
from flowrt.runtime.parent_death import die_with_parent

HEARTBEAT_S = 0.5
WAIT_S = 120.0
JOIN_S = 20.0


async def control(run_dir: Path, spec: RunSpec) -> None:
    """Run a controller with the recipe's dataflow and the mode's policies; write its address, then its summary."""
    flow = grpo.dataflow(spec.config())
    core = Core(spec.settings(), flow, spec.policies())
    server = Server(
        core=core,
        config=spec.to_json(),
        run_dir=run_dir,
        heartbeat_s=HEARTBEAT_S,
        request_timeout_s=WAIT_S,
    )
    reply(server.bind("tcp://127.0.0.1:0"))
    ended = await server.run()
    summary = server.summary(spec.mode.bound)
    server.ledger.close()
    reply({**summary, "numbers": server.metrics.numbers, "exit_code": ended.code, "reason": ended.reason})


async def work(address: str, workers: list[str]) -> None:
    """Run the workers concurrently, each with a session of its own; write their errors."""
    errors = await asyncio.gather(*(run_worker(address, worker) for worker in workers))
    reply("; ".join(error for error in errors if error))


async def run_worker(address: str, worker: str) -> str:
    role = worker.split("-")[0]
    session = await connect(address, worker, role, JOIN_S)
    error = ""
    try:
        await _run_role(session, role)
    except* Stopped:
        pass
    except* FlowError as failed:
        error = f"{worker}: {failed.exceptions[0]}"
    finally:
        await session.close(error)
    return error


async def _run_role(session: Session, role: str) -> None:
    await ROLES[role](session, RunSpec.from_json(session.welcome.config))
    await session.wait_stopped()


def main() -> None:
    die_with_parent()
    torch.set_num_threads(1)
    workers = sys.argv[1:]
    reply("ready")
    for line in sys.stdin:
        task = json.loads(line)
        if workers == ["controller"]:
            run_loop(control(Path(task["run_dir"]), RunSpec(**task["spec"])))
        else:
            run_loop(work(task["address"], workers))


if __name__ == "__main__":
    main()
