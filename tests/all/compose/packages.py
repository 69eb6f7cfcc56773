"""Docker, which `make test-all PART=compose` installs as root on Debian where no engine answers."""

import sys

from tests.all.compose.engine import answers, compose_command
from tests.all.system import packages

# By program.
PACKAGES = {
    "dockerd": "docker.io",
    "docker-compose": "docker-compose",
    "debootstrap": "debootstrap",
}

if __name__ == "__main__":
    sys.exit(0 if answers() and compose_command() else packages.install(PACKAGES))
