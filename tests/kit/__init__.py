"""What several modules of tests need, and no benchmark."""
