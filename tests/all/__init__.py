"""What `make test` leaves out: `make test-all PART=FOLDER` runs the tests of one folder."""
