"""Points of a study: every combination of a grid (`grid`), or a space to search (`space`).

Plain data; knows nothing of torch or Lightning, nor how a trial is run. Start at `grid`.
"""
