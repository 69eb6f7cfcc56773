"""Tests against programs of the system: several hosts (network namespaces), Slurm, kubectl, Chromium.

`make test-all PART=system` installs their Debian packages when it runs as root. Elsewhere a test whose program
is missing is skipped, and the skip names the package.
"""
