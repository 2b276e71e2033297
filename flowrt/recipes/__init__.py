"""Recipes: the configuration of a run, the dataflow of GRPO, tasks and run directories.

- A run has one `config.RunConfig`; it is parsed once, on the controller's side, and workers receive it as TOML.
- `constraints.check` accepts a configuration before anything starts; a mistake is one sentence with the key and a fix.
- `grpo` is the whole dataflow; `tasks.registry` is the table of recipes.
- No module here imports torch. User code runs only in the processes of `flowrt.rewards`.
"""
