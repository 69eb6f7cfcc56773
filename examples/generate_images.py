"""Two prompts for a vision-language model, one with an image: token ids and base64.

python examples/generate_images.py photo.jpg [http://127.0.0.1:8000] [MODEL]
"""

import base64
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path

from transformers import AutoTokenizer


def main(
    photo: str, url: str = "http://127.0.0.1:8000", model: str = "Qwen/Qwen2.5-VL-3B-Instruct"
) -> None:
    # Before anything is downloaded: the file, and a server.
    try:
        photo_base64 = base64.b64encode(Path(photo).read_bytes()).decode()
    except OSError as error:
        sys.exit(f"expected a picture, got {photo}: {error.strerror}")
    try:
        urllib.request.urlopen(url + "/live", timeout=10).close()
    except OSError:
        sys.exit(f"{url}: no server answers; start one with `titopool serve`, or give its URL")
    tokenizer = AutoTokenizer.from_pretrained(model)
    look = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
    prompts = []
    for content in (look, "And what is two plus two?"):
        messages = [{"role": "user", "content": content}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    body = {
        "prompts": prompts,
        "images": [[photo_base64], None],
        "mm_processor_kwargs": {"max_pixels": 512 * 28 * 28},
        "max_tokens": 32,
    }
    request = urllib.request.Request(
        url + "/generate/", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=600) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        sys.exit(json.load(error)["error"]["message"])
    for sent, used, ids in zip(
        prompts, answer["prompt_ids"], answer["completion_ids"], strict=True
    ):
        # The second figure is larger where an image was expanded.
        print(len(sent), "ids sent,", len(used), "used:", tokenizer.decode(ids))


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(f"expected a picture, got none; {__doc__.strip().splitlines()[-1]}")
    main(*sys.argv[1:])
