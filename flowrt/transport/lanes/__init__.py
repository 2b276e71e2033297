"""Lanes: ordered streams of tensors between two workers, over gloo, shared memory, nccl or hccl.

- Both ends take the turns of a lane in the order in which the controller issued them.
- Each lane has its own thread. A lane that has failed stays failed; the controller opens a new incarnation of it.
- A transfer that moves nothing until the deadline, or less than the minimum rate beyond it, fails.
"""
