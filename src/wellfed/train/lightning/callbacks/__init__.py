"""Hangs what is ours on Lightning's hooks: one file a concern, none of which changes what is learned.

`clock` times steps, `figures` hands metrics over, `checkpoints` keeps files, `progress` shows a bar, `stop` ends a
run at a step's end when it was asked to, `profile` records a trace; `together.Together` makes one of all.
"""
