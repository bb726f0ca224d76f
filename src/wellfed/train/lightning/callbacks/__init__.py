"""Our callbacks on Lightning's hooks, one file a subject; none changes what is learned.

Start from `clock`, which times steps. `figures` writes metrics, `progress` shows a bar, `stop` ends a run after a step.
`profile` records a trace, `synchronisations` finds waits for the GPU. `pruning` and
`stage_switch` act after validations and between epochs. `users` is about the user's callbacks.
"""
