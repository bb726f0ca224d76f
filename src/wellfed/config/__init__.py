"""Makes one checked `RunConfig` of what was typed, before torch is imported.

Knows Hydra, OmegaConf, the schema and its rules. Must not know torch, Lightning, the hardware or the plan: what
depends on the machine is checked later. Every fault of a configuration is reported at once, in one `ConfigError`.
Start from `compose.compose` (overrides -> `Composed`) and `entry.main` (what the entry scripts call). A knob is
declared in `schema`, read through `knobs.entries`; its rules with others stand in `rules`. Where something is at fault,
`faults` says what.
"""
