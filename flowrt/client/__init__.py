"""A worker's side of a run: its session with the controller.

- Every request has one answer, or raises WaitExpired at its deadline.
- The session reconnects to a restarted controller and resynchronises with it.
- Messages are handled in the order in which they arrive: lanes depend on it.
- Tensor columns of an offer or commit enter the store only when the controller accepts them.
"""
