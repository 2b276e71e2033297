"""``flowrt doctor``: checks the nodes of a run before it starts.

- `facts` and `probe` measure one node. `probe` is the only module that needs torch.
- `checks` compares facts with each other and with what the run needs (`estimate`). It is pure.
- Every finding that is not GOOD names the node, what was found, and the fix.
- `command` collects the facts of all nodes and prints the findings.
"""
