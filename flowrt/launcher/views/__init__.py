"""Views of a run: the live view of ``flowrt run``, the tables of ``flowrt status`` and ``flowrt ledger``.

- A view only reads: statuses of the controller, or files of the run directory. Damaged lines are skipped and logged.
- Text from outside (names, paths, errors) is printed as it is, without markup and control characters.
"""
