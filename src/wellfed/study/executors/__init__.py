"""Runs the trials of a study and yields each with its row when it has ended.

    executor.Executor ┬ local           processes forked here, one a GPU at a time
                      │   ├ pool          queue, GPUs, time limits
                      │   ├ fork_server   process that has made data and model, and forks a process for each trial
                      │   └ trial_work    what the forked processes do: plan points, run a trial
                      ├ ray             one Ray task a trial    ┐ remote: what both share
                      ├ submitit        one Slurm job a trial   ┘ node: runs the trial there, with a local executor
                      └ other_launcher  any other launcher of Hydra's
    launchers.executor_of picks one; hydra_jobs runs jobs that are no trials, for other sweepers of Hydra's.

Knows what a trial is, but not why it is run. Start from ``executor.Executor`` and ``local.LocalExecutor``.
"""
