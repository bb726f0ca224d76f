"""Holds the rules: functions of the evidence that return a Finding, else None. `run_rules` lists and runs them. Their
words are in ``findings.toml``."""
