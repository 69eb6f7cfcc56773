"""`python -m workers.supervisor`: gunicorn's master starts it."""

import sys

from workers.supervisor.supervisor import main

sys.exit(main())
