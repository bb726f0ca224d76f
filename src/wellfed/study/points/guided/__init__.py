"""Decides what tune tries next: the findings of the best configuration so far, then a table of moves.

Plain data. Start at `tune_search`; `moves` is the table, `gain` compares start and result.
"""
