"""What works with which family of models: `make matrix` (tests/all/matrix/__main__.py)."""
