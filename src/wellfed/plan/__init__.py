"""Decides every number that a run needs and says why. Pure: recorded facts in, decisions with reasons out.

Knows configuration and facts; needs no GPU, no torch, no Lightning. Start from `device.plan_device` (what can be
said before any data is read) and `decide.plan_run`; `run_plan` holds what they return.
"""
