"""Decides what tune tries next: the findings of the best configuration so far, then a table of moves.

Plain data. Start at `propose`; `moves` is the table, `steps` keeps or drops, `gain` compares start and result.
"""
