"""What works with which family of models: `make matrix` (tests/matrix/__main__.py)."""
