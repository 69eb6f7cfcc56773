"""`python -m titopool.gunicorn_server`: gunicorn, without the working folder on the import path.

`titopool serve` runs it. gunicorn's own command puts the folder that it starts in first, where
an `app.py` would be taken for our package.
"""

import os

from gunicorn.app.wsgiapp import WSGIApplication


class GunicornServer(WSGIApplication):  # type: ignore[misc]
    """gunicorn's command."""

    def chdir(self) -> None:
        """Only changes to the folder that the setting `chdir` names, if it names one."""
        os.chdir(self.cfg.chdir)


if __name__ == "__main__":
    GunicornServer("%(prog)s [OPTIONS] [APP_MODULE]").run()
