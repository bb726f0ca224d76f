"""Watches a PyTorch script as it is: times its steps from outside, and leaves the same files as a run of our own.

Nothing here imports torch or numpy before the script does, and nothing imports Lightning or Hydra. Start from
`watched_script.WatchedScript`; the command ``watch`` runs a script by `script_process.run`.

    script_process -> watched_script -> torch_marks -> script_steps -> script_record
    in code                             own_trainers
    --predict                           loader_trials
"""
