"""Scripts for building and maintaining this repository. Not part of the product."""
