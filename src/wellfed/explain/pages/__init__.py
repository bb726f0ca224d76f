"""Renders HTML pages that are one file each, and charts within them: no network, light and dark, paper.

Needs Jinja2 and numpy, and imports nothing of runs or studies. Start from `html_page`.
"""
