"""What a grammar costs: the time of a request with a new one, with one seen before, and with none.

    python -m benchmarks.grammars http://127.0.0.1:8000 [repeats]

Each schema gets a comment that makes it new. The time includes vLLM's own compilation.
"""

import json
import statistics
import sys
import time
import uuid
from typing import Any
from urllib.request import Request, urlopen

from harness.tool_schemas import TOOL_SCHEMAS

TIMEOUT_S = 600


def request_ms(url: str, schema: dict[str, Any] | None) -> float:
    """Milliseconds of a request for one token."""
    body: dict[str, Any] = {"prompts": [[1, 2, 3]], "max_tokens": 1}
    if schema is not None:
        body["generation_kwargs"] = {"structured_outputs": {"json": schema}}
    headers = {"Content-Type": "application/json"}
    began_s = time.perf_counter()
    with urlopen(
        Request(f"{url}/generate/", json.dumps(body).encode(), headers), timeout=TIMEOUT_S
    ):
        return 1000 * (time.perf_counter() - began_s)


def main() -> None:
    url, num_repeats = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3
    # The first grammar of a server also reads the tokenizer's vocabulary, here and in vLLM.
    print(f"first grammar of all: {request_ms(url, {'type': 'integer'}):.0f} ms")
    times: dict[str, list[float]] = {"none": [], "new": [], "again": []}
    for schema in [*TOOL_SCHEMAS.values()] * num_repeats:
        new = {**schema, "$comment": uuid.uuid4().hex}
        for name, sent in (("none", None), ("new", new), ("again", new)):
            times[name].append(request_ms(url, sent))
    for name, values in times.items():
        print(f"{name:5}: median {statistics.median(values):.1f} ms, longest {max(values):.1f} ms")


if __name__ == "__main__":
    main()
