"""The asyncio shell around the controller core: sockets, clock and disk.

- It makes no decision: events go to the core, and it executes the commands that come back.
- No message is sent before everything that it follows from is durable in the ledger.
- Every wait has a deadline; a run that ends gives its workers `SHUTDOWN_TIMEOUT_S` to leave.
- Malformed input costs the sender its connection and nothing else.
"""
