"""Fork server: workers of this host, forked from a process that has imported torch and transformers once.

- `parent` runs in the launcher, `child` is the fork server. They speak JSON over a sequenced-packet socket.
- The fork server has one thread and no accelerator context; it forks nothing where that is not so.
- A forked process has the environment, arguments, descriptors, title and random state of one that python started.
- Forked processes die with their fork server, which dies with the launcher. The next fork starts another fork server.
- What cannot be forked is started with python.
"""
