"""Runs the trials of a study and yields each with its row when it has ended.

    executor.Executor        the one loop: start trials while slots are free, wait, yield rows
      ├ local                processes forked here, one a GPU at a time (slots)
      │   ├ point_plans      what exists before the trials: fork servers, plans of points
      │   ├ fork_server      process that has made data and model, and forks a process for each trial
      │   └ trial_work       what the forked processes do: plan points, run a trial
      └ launchers            hands trials to another launcher of Hydra, such as those of Ray and Slurm

An executor does not depend on why a trial is run. Start from ``executor.Executor`` and ``local.LocalExecutor``.
"""
