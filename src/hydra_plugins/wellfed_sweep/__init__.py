"""Plugins ``hydra/sweeper=wellfed`` and ``hydra/launcher=wellfed``; a sweep option chooses both.

Imported at every start of Hydra: standard library and Hydra alone at the top of each file.
"""
