"""Rules of the sources, documents and examples."""
