"""A controller of a small dataflow that can be killed and started again.

python small_controller.py RUN_DIR ADDRESS [eval] [timeout=WORKER_TIMEOUT_S] [rejoin=REJOIN_TIMEOUT_S] [budget=ROWS];
with ``eval``, prompts of the flow "eval" are evaluated, of which at most ROWS are live.
"""

import asyncio
import sys
from pathlib import Path

from flowrt.controller.core import Core
from flowrt.controller.policies.admission import StrictLag
from flowrt.controller.policies.batching import TokenBudget
from flowrt.controller.policies.dispatch.base import Fifo
from flowrt.controller.policies.weight_sync import DelayedUpdate
from flowrt.controller.server.server import Server
from flowrt.controller.settings import Dataflow, Policies, Settings
from flowrt.controller.storage.ledger import Ledger
from flowrt.protocol.messages import Column, Stage
from flowrt.runtime.parent_death import die_with_parent

FLOW = Dataflow(
    (Column("prompt", "int32", "group"), Column("response", "float32", "slot")),
    (
        Stage("rollout", needs=("prompt",), makes=("response",), generates=True),
        Stage("reward", needs=("response", "prompt"), makes=("reward",)),
        Stage("train", needs=("response", "reward"), makes=(), flow="train", whole_groups=True),
    ),
    "train",
    "train",
    token_columns=("response",),
)
EVAL_FLOW = Dataflow(
    FLOW.columns,
    (
        Stage("rollout", needs=("prompt",), makes=("response", "truncated"), generates=True),
        Stage("reward", needs=("response", "prompt"), makes=("reward",)),
        Stage("evaluate", needs=("reward", "truncated"), makes=(), flow="eval"),
        Stage("train", needs=("response", "reward"), makes=(), flow="train", whole_groups=True),
    ),
    "train",
    "train",
    token_columns=("response",),
)
RECONNECT_TIMEOUT_S = 60.0
DEFAULTS = {"timeout": 30.0, "rejoin": 60.0, "budget": 1_000_000}


async def serve(run_dir: Path, address: str, flow: Dataflow, limits: dict[str, float]) -> None:
    policies = Policies(StrictLag(1), Fifo(), TokenBudget(1), DelayedUpdate())
    settings = Settings(
        steps=3,
        groups_per_step=1,
        completing_roles=("trainer",),
        rejoin_timeout_s=limits["rejoin"],
        reconnect_timeout_s=RECONNECT_TIMEOUT_S,
        worker_timeout_s=limits["timeout"],
        budget_rows=int(limits["budget"]),
    )
    ledger = Ledger(run_dir / "ledger.sqlite")
    core = Core(settings=settings, flow=flow, policies=policies, term=ledger.term, recovered=ledger.recover())
    server = Server(core, "", run_dir, heartbeat_s=0.5, request_timeout_s=60.0, ledger=ledger)
    sys.stdout.write(server.bind(address) + "\n")
    sys.stdout.flush()
    await server.run()


if __name__ == "__main__":
    die_with_parent()
    given = dict(word.split("=") for word in sys.argv[3:] if "=" in word)
    limits = DEFAULTS | {name: float(value) for name, value in given.items()}
    flow = EVAL_FLOW if "eval" in sys.argv[3:] else FLOW
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2], flow, limits))
