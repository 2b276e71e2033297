"""Attribution of time: what each second of each worker was spent on, and which worker caused each wait.

- `causes` defines the eight kinds of time, and waits with their cause and root.
- `wait_log` records, from the core's state, why each parked request waits.
- `sweep` assigns one kind of time to every instant of a worker, from reported spans and recorded waits.
- `account` adds the seconds up by optimiser step. All modules are pure: times are arguments.
"""
