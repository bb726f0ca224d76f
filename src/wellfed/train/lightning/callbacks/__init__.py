"""Our callbacks on Lightning's hooks, one file a subject; none changes what is learned.

Start from `clock`, which times steps. `figures` writes metrics, `progress` shows a bar, `stop` ends a run after a step.
`profile` records a trace, `synchronisations` finds waits for the GPU. `pruning` acts after validations. `users` is
about the user's callbacks.
"""
