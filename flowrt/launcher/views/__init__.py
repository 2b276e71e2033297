"""Views of a run in the terminal: of ``flowrt run``, ``status``, ``ledger``, ``replay``, ``samples`` and ``time``.

- A view only reads: statuses of the controller, or files of the run directory. Damaged lines are skipped and logged.
- Text from outside (names, paths, errors) is printed without markup, its control characters as escapes.
"""
