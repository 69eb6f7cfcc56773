"""Workers that come, fail, hang and go."""
