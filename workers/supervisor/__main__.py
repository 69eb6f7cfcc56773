"""`python -m workers.supervisor`, which gunicorn's master runs."""

import sys

from workers.supervisor.supervisor import main

sys.exit(main())
