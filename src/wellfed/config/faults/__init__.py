"""Finds the faults of a configuration, each with its way out.

Two parts: the search through command line and files, which runs only where they do not compose (start from
``find.find_faults``), and what a ``_target_`` takes by its source (``static_signature``, ``annotation``), which
``wellfed.config.check`` asks each time. Knows the schema, the yaml files and what was typed; imports nothing that a
configuration names.
"""
