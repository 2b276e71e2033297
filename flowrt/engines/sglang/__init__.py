"""Rollout on an SGLang server over HTTP, started by the worker or already running.

- The worker's environment needs no SGLang: the server has its own Python.
- If the server dies, its sequences are sent to the next server with the tokens received so far.
- A server whose weights are uncertain gets no requests until it has all weights of the current version.
- `tensor_pickles` is the only module that writes a pickle; no module reads one.
"""
