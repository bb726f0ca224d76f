"""Runs the trials of a study and yields each with its row when it has ended.

    executor.Executor        the one loop: start trials while there is room, wait, yield rows
      ├ local                processes forked here, one a GPU at a time (slots)
      │   ├ prepared         fork servers and plans, which are there before trials
      │   ├ fork_server      process that has made data and model, and forks a process for each trial
      │   └ trial_work       what the forked processes do: plan points, run a trial
      ├ ray                  one Ray task a trial    ┐ remote: what both share
      ├ submitit             one Slurm job a trial   ┘ node: runs the trial there, with a local executor
      └ launchers            picks one, and has the one for any other launcher of Hydra's

``hydra_jobs`` runs jobs that are no trials, for other sweepers of Hydra's. An executor knows what a trial is, but not
why it is run. Start from ``executor.Executor`` and ``local.LocalExecutor``.
"""
