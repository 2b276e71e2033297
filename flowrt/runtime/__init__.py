"""Process primitives: clock, waits, event loop, files, host facts, death of the parent, timeline.

- Every wait has a deadline, and names what it waits for and who it is blocked on.
- A file or directory that is replaced is found complete under its name, the old one or the new one.
- No process outlives the parent that started it, unless it asked for that.
"""
