"""Finds the faults of a configuration, each with its way out.

Two parts: the search through command line and files, which runs only where they do not compose (start from
``find.find_faults``), and the check of each ``_target_`` and its arguments (``target_faults``). Knows the schema, the
yaml files and what was typed. Targets are imported only to check an argument that no yaml lists.
"""
