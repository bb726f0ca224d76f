"""Runs the trials of a study and yields each with its row when it has ended.

    executor.Executor        the one loop: start trials while slots are free, wait, yield rows
      ├ local                processes forked here, one a GPU at a time (slots)
      │   ├ point_plans      what exists before the trials: fork servers, plans of points, feature rows
      │   ├ fork_server      process that has made data and model, and forks a process for each trial
      │   └ trial_work       what the forked processes do: plan points, run a trial
      ├ ray                  one Ray task a trial    ┐ remote: what both share, and what runs the trial there;
      ├ submitit             one Slurm job a trial   ┘ trial_process starts that
      └ launchers            picks one, and has the one for any other launcher of Hydra's

``hydra_jobs`` runs jobs that are not trials, for other sweepers of Hydra. An executor does not depend on why a trial is
run. Start from ``executor.Executor`` and ``local.LocalExecutor``.
"""
