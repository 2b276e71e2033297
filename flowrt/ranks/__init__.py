"""Data-parallel ranks of a trainer: launch under torchrun, rendezvous, process group, collective calls with deadlines.

- No rendezvous unpickles data from the network: it uses files on one host, a store of counters on several.
- Every collective call has a deadline, and its error names the ranks that did not arrive.
- A rank that is exempt (loading, saving, waiting for samples) is waited for as long as its process makes progress.
"""
