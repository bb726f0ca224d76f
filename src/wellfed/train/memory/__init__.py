"""Manages device memory during a run: feature tables, memory errors, and fallbacks that need less memory.

Works on tensors and bytes, without Lightning, configuration or loaders. Start from `features.hold` and
`step_down.Fallbacks`.
"""
