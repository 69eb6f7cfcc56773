"""The worker's parts."""
