"""Plugin ``hydra/sweeper=wellfed``, which an option of ``sweep`` or ``search`` needs.

Imported at every start of Hydra: standard library and Hydra alone at the top of each file.
"""
