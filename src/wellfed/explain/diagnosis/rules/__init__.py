"""Holds the rules, each a function with the id of its finding: takes the evidence and returns a Finding, else None.

`wellfed.explain.diagnosis.run_rules` lists and runs them. `rank_rules.straggler` has an id for each cause.
"""
