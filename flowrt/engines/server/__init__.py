"""Rollout on a generation server over HTTP, started by the worker or already running.

- The worker's environment needs no server: a server has its own Python.
- `dialect` is what differs between kinds of servers; `flowrt.engines.sglang` is one.
- If the server dies, its sequences are sent to the next server with the tokens received so far.
- A server whose weights are uncertain gets no requests until it has all weights of the current version.
"""
