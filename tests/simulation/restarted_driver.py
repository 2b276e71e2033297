"""Messages to a core, one by one, whose controller is restarted; workers rejoin one by one."""

import dataclasses
from typing import Any

from flowrt.controller.events import AppendRestartLog, Command, Event, Tick, WorkerConnected
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from flowrt.protocol.messages import Part
from tests.simulation.cluster import make_core
from tests.simulation.controller_restart import DurableState
from tests.simulation.core_driver import CoreDriver
from tests.simulation.scenario import MODEL


class RestartedDriver(CoreDriver):
    """A driver whose controller can be restarted from its durable state; workers rejoin one by one."""

    def __init__(self, **scenario: Any) -> None:
        self.disk = DurableState()
        self.term = 1
        super().__init__(**scenario)

    def event(self, event: Event) -> list[Command]:
        commands = super().event(event)
        for command in commands:
            if isinstance(command, AppendRestartLog):
                self.disk.keep(command.entry)
        return commands

    def restart(self) -> None:
        """The controller is killed, and another one recovers."""
        self.term += 1
        settings = self.core.settings
        self.core = make_core(self.scenario, None, self.term, self.disk.recovered())
        self.core.env = dataclasses.replace(self.core.env, settings=settings)

    def rejoin(self, worker: str, *parts: Part, is_late: bool = False) -> list[Command]:
        """A worker connects again and sends its inventory, unless that is late; returns the commands."""
        role = worker.rstrip("0123456789")
        commands = self.event(WorkerConnected(WorkerId(worker), role, "host", (), self.term - 1))
        if role == "rollout":
            commands += self.send(worker, m.WeightsActivated(MODEL, 0))
        return commands if is_late else commands + self.send(worker, m.Inventory(parts, ()))

    def time_out_recovery(self) -> None:
        """Let the rejoin timeout pass."""
        self.event(Tick())
        self.now += self.core.settings.rejoin_timeout_s + 1
        self.event(Tick())
        assert not self.core.state.recovery.is_active
