"""Watches other people's trainings, and leaves the same files as a run of our own.

Nothing here imports torch or numpy before a script does, and nothing imports Lightning (except `gpu_curves`) or Hydra.
Start from `watched_script.WatchedScript`; the command ``watch`` runs a script by `script_process.run`.

    a script       script_process -> watched_script -> torch_marks -> script_steps
    a loop         gpu_watch, gpu_curves -> loop_watch
    their record   script_record; ranks_of_script
    any program    monitor -> board -> screens (``wellfed monitor``)
"""
