"""Renders HTML pages that are one file each, and pictures within them: no network, no script, light and dark, paper.

Knows Jinja2 and matplotlib; knows nothing of runs or sweeps.
"""
