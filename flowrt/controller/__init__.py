"""The controller: it routes metadata between workers, and is the only process that decides.

- `core`, `environment`, `events`, `settings`, `state`, `transitions` and `policies` are pure: no event loop, clock,
  randomness, socket or disk. `server` gives them all of these, `storage` the disk.
- Every change of a run's state is caused by an event that `Core.handle` was given.
- Nothing is sent to a worker before what it depends on is in the ledger or the replay log.
- A worker that violates the protocol loses its own work, never that of another worker.
"""
