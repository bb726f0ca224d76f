"""Makes one checked `RunConfig` of what was typed, before torch is imported.

All faults of a configuration are reported at once, in one `ConfigError`. Faults that depend on the machine are found
later: no file here imports torch or Lightning, or reads the hardware or the plan. Start from `compose.compose`
(overrides -> `Composed`) and `entry.main` (called by the entry scripts). Knobs are declared in `schema`, their rules in
`rules`. `faults` finds the cause of a failure.
"""
