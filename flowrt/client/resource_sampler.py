"""Measures what the process of a worker uses: processors, memory, accelerators, and what its engine generates."""

import resource
from collections.abc import Callable
from time import monotonic

from flowrt.protocol.resources import EngineUse, ResourceUse
from flowrt.transport.devices import accelerator_use, resident_bytes


class ResourceSampler:
    """Each call of `take` measures the time since the call before; it takes some 50 µs without an accelerator."""

    def __init__(self) -> None:
        self.engine: Callable[[], EngineUse] | None = None
        """What the engine of a worker that generates has done; called on any thread. None: this worker has none."""
        self._before_s = monotonic()
        self._processor_s = _processor_s()
        self._generated = 0

    def take(self) -> ResourceUse:
        """What was used since the last call."""
        now, processor_s = monotonic(), _processor_s()
        seconds = max(now - self._before_s, 1e-6)
        engine = None if self.engine is None else self.engine()
        device = accelerator_use()
        use = ResourceUse(
            seconds=seconds,
            processors=(processor_s - self._processor_s) / seconds,
            memory=resident_bytes(),
            tokens=-1 if engine is None else max(engine.generated - self._generated, 0),
            cache_tokens=0 if engine is None else engine.cache_tokens,
            cache_size=0 if engine is None else engine.cache_size,
            devices=device.count + (0 if engine is None else engine.devices),
            device_allocated=device.allocated_bytes,
            device_reserved=device.reserved_bytes,
            device_total=device.total_bytes,
            device_use=device.busy_share,
        )
        self._before_s, self._processor_s = now, processor_s
        self._generated = 0 if engine is None else engine.generated
        return use


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
