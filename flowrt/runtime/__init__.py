"""Process primitives: clock, waits, event loop, files, host facts, death of the parent, sessions, timeline.

- Every wait has a deadline, and names what it waits for and the worker or object that has to act.
- A reader of a file that is replaced finds the complete old one or the complete new one.
- A process that calls `die_with_parent` does not outlive its parent.
- The processes of a session with a `SessionReaper` do not outlive the process that started them.
"""
