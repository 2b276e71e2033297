"""The controller: it routes metadata between workers and makes every decision of a run.

- `core`, `events`, `settings`, `state`, `transitions`, `policies`, `attribution` and `diagnostics` are pure: no event
  loop, clock, randomness, socket or disk. `server` has the event loop, clock and sockets, `storage` the disk.
- Every change of a run's state is caused by an event that `Core.handle` was given.
- A message is sent to a worker only after the changes that it depends on are in the ledger or the restart log.
- A worker that violates the protocol loses its own work; other workers keep theirs.
"""
