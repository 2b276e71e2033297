"""Fork server: workers of this host, forked from a process that has imported torch and transformers once.

- `parent` runs in the launcher, `child` is the fork server. They exchange JSON over a sequenced-packet socket.
- The fork server has one thread and no accelerator context; otherwise it forks nothing.
- A forked process has the environment, arguments, descriptors, title and fresh random state of a new python process.
- Forked processes die with their fork server, which dies with the launcher. The next fork starts another fork server.
- A command that cannot be forked is started with python.
"""
