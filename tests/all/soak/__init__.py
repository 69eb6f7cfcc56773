"""The memory of an engine over many updates."""
