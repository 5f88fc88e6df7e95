"""The commands: one file each, and what they share. `pipelines.cli` dispatches and imports nothing heavy."""
