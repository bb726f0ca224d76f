"""Many trials: sweep, search and tune; the processes that run trials, here, on Ray or with submitit.

Knows points, trials, ledgers and ranks; knows nothing of the command line.
Start from `trials/sweep.py`, `trials/searching.py` and `trials/tuning.py`.
"""
