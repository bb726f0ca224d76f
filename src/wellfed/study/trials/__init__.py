"""Runs the trials of a sweep or a tune, in processes forked from one that has made what trials share.

    sweep.run_sweep ─ TrialSetup      composes and plans the points: what can't be run is a row
                    ├ SweepExecution  runs them in a TrialPool, which yields each as it ends
                    ├ SweepElsewhere  has them run on other machines, each in a `node` process there
                    └ SweepLedger     keeps the rows: what is missing, what is best, the ranks
    tuning.tune     ─ TuneTrials      the same for one point after the other, as the search proposes them
                    ├ TuneOptions     writes what was found
                    └ TuneReport      tells it

Knows what a trial is; what is made of its results is in the rooms ``sweep`` (grid, ledger, ranks) and ``tune``.
Start from ``sweep.run_sweep``, ``tuning.tune`` and ``trial_pool``.
"""
