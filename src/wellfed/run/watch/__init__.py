"""Watches a PyTorch script as it is: times its steps from outside, and leaves the same files as a run of our own.

Nothing here imports torch or numpy before the script does, and nothing imports Lightning or Hydra. Start from
`watched_script.WatchedScript`; the command ``watch`` runs a script by `script_process.run`.

    a script     script_process
    its steps    watched_script -> torch_marks -> script_steps -> rows_of_steps, script_record
    its ranks    ranks_of_script
    in code      watch_block
"""
