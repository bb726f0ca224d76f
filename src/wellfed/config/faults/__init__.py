"""Finds every fault of a configuration that did not compose, each with its way out. Runs only on failure.

Knows the schema, the yaml files and what was typed; imports nothing that a configuration names.
Start from ``find.find_faults``.
"""
