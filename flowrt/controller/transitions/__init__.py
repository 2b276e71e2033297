"""Transitions: functions of the state, the environment and a message or event, which return commands.

- A transition validates its message first; a refused message has changed nothing.
- Commands are returned in the order in which they have to be executed.
- A function that serves a parked request returns no commands while the request has to wait.
- Lost work goes through `rollback`, which leaves every affected slot ready for the stage that has to run again.
- Imports go one way: `rollback`, then `offers`, `commits` and `step_selection`, then `pulls`, then the rest.
"""
