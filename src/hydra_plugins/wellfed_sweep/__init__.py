"""Plugin ``hydra/sweeper=wellfed`` with its default ``hydra/launcher=wellfed``; a sweep option chooses both.

Imported at every start of Hydra: standard library and Hydra alone at the top of each file.
"""
