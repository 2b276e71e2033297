"""Programs of responses: their processes, and what tests do with their objects.

`sandbox` starts a process; `process`, `proxies`, `values` and `descendants` run in it, and import the standard library
and each other only.
"""
