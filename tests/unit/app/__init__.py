"""The front end's parts."""
