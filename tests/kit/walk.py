"""The modules of a front end that a request enters, and the calls that go from one to another.

    python -m gevent.monkey --module tests.kit.walk ENDPOINT

prints them as JSON, of `POST /generate/` with one prompt of three ids.

Runs in: a process of its own, with the front end's greenlets and a worker behind ENDPOINT.
"""

import json
import sys
from types import FrameType
from typing import Any

from app import create_app
from harness.servers import REPOSITORY, wait_until
from titopool.settings.config import ServerConfig

BODY = {"prompts": [[5, 6, 7]], "max_tokens": 3}
# The first ones import and fill caches, and how messages fall into turns of the link differs.
NUM_REQUESTS = 50
ROOMS = tuple(str(REPOSITORY / one) + "/" for one in ("app", "titopool"))


class Walk:
    """What is called between `begin` and `end`, by all greenlets of this thread."""

    def __init__(self) -> None:
        self._is_on = False
        self._entered: set[str] = set()
        self._num_hops = 0

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """As `sys.setprofile` wants it; greenlets that begin later have it, too."""
        if not self._is_on or event != "call" or not frame.f_code.co_filename.startswith(ROOMS):
            return
        called, caller = frame.f_code.co_filename, frame.f_back
        # Between two modules of ours there may be a library's frames.
        while caller is not None and not caller.f_code.co_filename.startswith(ROOMS):
            caller = caller.f_back
        self._entered.add(called)
        self._num_hops += caller is None or caller.f_code.co_filename != called

    def begin(self) -> None:
        self._entered, self._num_hops, self._is_on = set(), 0, True

    def end(self) -> tuple[int, int]:
        self._is_on = False
        return len(self._entered), self._num_hops


def main(endpoint: str) -> dict[str, Any]:
    """The fewest modules and hops of several requests: a heartbeat may come in one of them."""
    walk = Walk()
    sys.setprofile(walk.note)
    app = create_app(ServerConfig(endpoints=[endpoint], heartbeat_interval_s=1.0))
    client = app.test_client()
    wait_until(lambda: client.get("/ready").status_code == 200, 30)
    found = []
    for _ in range(NUM_REQUESTS):
        walk.begin()
        answer = client.post("/generate/", json=BODY)
        found.append(walk.end())
        assert answer.json["completion_ids"] == [[7, 6, 5]], answer.text
    modules, hops = map(min, zip(*found, strict=True))
    return {"modules": modules, "hops": hops}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
