"""A client of the binary answer: ids and log-probabilities as NumPy arrays, nothing to parse.

python examples/generate_binary.py [http://127.0.0.1:8000]
"""

import sys
import urllib.error
import urllib.request

import msgspec
import numpy as np


def main(url: str = "http://127.0.0.1:8000") -> None:
    prompts = [[42, 1393, 14], [5, 6]]
    body = msgspec.json.encode({"prompts": prompts, "n": 2, "max_tokens": 8, "logprobs": 0})
    headers = {"Content-Type": "application/json", "Accept": "application/msgpack"}
    request = urllib.request.Request(f"{url}/generate/", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=600) as reply:
            answer = msgspec.msgpack.decode(reply.read())
    except urllib.error.HTTPError as error:
        # Errors are JSON.
        sys.exit(msgspec.json.decode(error.read())["error"]["message"])
    except urllib.error.URLError:
        sys.exit(f"{url}: no server answers; start one with `titopool serve`, or give its URL")
    for index, ids in enumerate(answer["completion_ids"]):
        logprobs = np.frombuffer(answer["logprobs"][index], "<f4")
        print(prompts[index // 2], "->", np.frombuffer(ids, "<i4"), logprobs)


if __name__ == "__main__":
    main(*sys.argv[1:])
