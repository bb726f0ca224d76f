"""Reads damaged bytes of every file that the project reads: `make test` has a few examples, `make fuzz` runs for long.

Start reading at `readers.READERS`. `damage` makes damaged bytes, `child` reads them in a limited process, `corpus/` keeps
inputs that once went wrong.
"""
