"""The asyncio server around the controller core: sockets, clock and disk.

- The server makes no decision: it passes events to the core and executes the commands that the core returns.
- No message is sent before all decisions that it follows from are durable in the ledger.
- Every wait has a deadline; when a run ends, its workers have `SHUTDOWN_TIMEOUT_S` to leave.
- A malformed message closes the connection of its sender and has no other effect.
"""
