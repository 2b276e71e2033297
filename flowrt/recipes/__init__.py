"""Recipes: the configuration of a run, the dataflow of GRPO, tasks and run directories.

- A run has one `config.RunConfig`; it is parsed once, on the controller's side, and workers receive it as TOML.
- `constraints.check` checks a configuration before anything starts; an error is one sentence with the key and a fix.
- `grpo` is the whole dataflow; `tasks.registry` is the table of recipes.
- No module here imports torch. User code runs in child processes; workers also execute the file of a user's task
  (`tasks.task_file`).
"""
