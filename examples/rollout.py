"""Rollouts of three turns with a tool: token ids for a trainer, none of them tokenized twice.

python examples/rollout.py [http://127.0.0.1:8000]
"""

import sys

from titopool import Client, pad_rollouts, run_rollouts

# Lets a model that was never trained call the tool. Leave it out for a model that can.
CALL = (
    r'<tool_call>\n\{"name": "multiply", "arguments": '
    r'\{"a": [1-9][0-9]?, "b": [1-9][0-9]?\}\}\n</tool_call>'
)


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def main(url: str = "http://127.0.0.1:8000") -> None:
    client = Client(url)
    question = [{"role": "user", "content": "What is 6 times 7?"}]
    rollouts = run_rollouts(
        client,
        [question],
        tools=[multiply],
        n=4,
        max_turns=3,
        max_tokens=64,
        temperature=1.0,
        structured_outputs={"regex": CALL},
    )
    for rollout in rollouts:
        if rollout.error is not None:
            sys.exit(f"a rollout failed: {rollout.error}")
        for message in rollout.messages:
            print(message["role"], "->", message["content"])
    arrays = [rollout.arrays() for rollout in rollouts]
    batch = pad_rollouts(arrays, pad_id=0)
    print(batch.input_ids.shape, "ids, of which the model wrote", int(batch.loss_mask.sum()))
    print("sampled by the weights of version", batch.weight_versions.max())


if __name__ == "__main__":
    main(*sys.argv[1:])
