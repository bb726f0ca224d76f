"""Finds the faults of a configuration, each with its way out.

Two parts: the search through command line and files, which runs only where they do not compose (start from
``find.find_faults``), and what each ``_target_`` takes by its source (``target_faults``), which every composed
configuration is held against. Knows the schema, the yaml files and what was typed; imports nothing that a
configuration names.
"""
