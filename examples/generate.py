"""The smallest client: token ids in, token ids and log-probabilities out.

python examples/generate.py [http://127.0.0.1:8000]
"""

import sys

import requests


def main(url: str = "http://127.0.0.1:8000") -> None:
    prompts = [[42, 1393, 14], [5, 6]]
    try:
        answer = requests.post(
            f"{url}/generate/",
            json={"prompts": prompts, "n": 2, "max_tokens": 8, "logprobs": 0},
            timeout=600,
        )
    except requests.ConnectionError:
        sys.exit(f"{url}: no server answers; start one with `titopool serve`, or give its URL")
    if not answer.ok:
        sys.exit(answer.json()["error"]["message"])
    body = answer.json()
    for index, ids in enumerate(body["completion_ids"]):
        logprobs = [entries[0] for entries in body["logprobs"][index]]
        print(prompts[index // 2], "->", ids, f"log-probability {sum(logprobs):.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
