"""Renders HTML pages that are one file each, and pictures within them: no network, light and dark, paper.

Curves are drawn by a script within the page (`chart`); scatter plots are SVG.
Needs Jinja2 and numpy, and imports nothing of runs or studies. Start from `html_page`.
"""
