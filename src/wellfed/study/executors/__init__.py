"""Runs the trials of a study and yields each with its end.

    executor      what every executor is given, and what it yields
    local         here: servers, plans of points, one trial a GPU at a time
    fork_server   process that has made data and model, and forks a process for each trial
    trial_work    functions of the forked processes: plan points, run a trial
    launchers     hands trials to another launcher of Hydra, such as those of Ray and Slurm

An executor does not depend on why a trial is run. Start from ``executor.Executor`` and ``local.LocalExecutor``.
"""
