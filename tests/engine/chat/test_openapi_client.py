"""A client that openapi-python-client generates from a running server's description, and what it does.

The generator is in a folder of its own (`make tools`): it asks for other versions of its
dependencies than vLLM.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.api_schemas import operations
from harness.servers import Server, environment

GENERATOR = Path(sys.prefix) / "clients" / "openapi-python-client"
# Prints what the generated functions return.
SCRIPT = """
import json
import sys

from generated import Client
from generated.api.generate import post_detokenize, post_generate, post_tokenize
from generated.api.openai import get_v1_models, post_v1_chat_completions
from generated.api.weights import get_is_paused
from generated.models import (
    DetokenizeBody, Error, GenerateBody, OpenAIChatBody, OpenAIChatBodyMessagesItem, TokenizeBody,
)

client = Client(base_url=sys.argv[1], timeout=60)
tokenized = post_tokenize.sync(client=client, body=TokenizeBody(prompt="Hello, world"))
text = post_detokenize.sync(client=client, body=DetokenizeBody(tokens=tokenized.tokens))
generated = post_generate.sync(
    client=client, body=GenerateBody(prompts=[tokenized.tokens], n=2, max_tokens=4),
    x_request_id="generated-1",
)
message = OpenAIChatBodyMessagesItem.from_dict({"role": "user", "content": "Hello"})
body = OpenAIChatBody(messages=[message], max_tokens=4, logprobs=True, return_token_ids=True)
chat = post_v1_chat_completions.sync(client=client, body=body)
refused = post_generate.sync_detailed(client=client, body=GenerateBody(prompts=[[2**20]]))
assert isinstance(refused.parsed, Error), refused
print(json.dumps({
    "model": get_v1_models.sync(client=client).data[0].id,
    "text": text.prompt,
    "prompt_ids": generated.prompt_ids,
    "lengths": [len(ids) for ids in generated.completion_ids],
    "chat_ids": len(chat.choices[0].token_ids),
    "chat_logprobs": len(chat.choices[0].logprobs.content),
    "role": chat.choices[0].message.role,
    "refused": [refused.status_code, refused.parsed.error.code],
    "is_paused": get_is_paused.sync(client=client).is_paused,
    "tokens": tokenized.tokens,
}))
"""


@pytest.fixture(scope="module")
def generated(single_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the package `generated`."""
    folder = tmp_path_factory.mktemp("client")
    search = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    result = subprocess.run(
        [
            sys.executable, "-m", "openapi_python_client", "generate", "--meta", "none",
            "--url", f"{single_server.url}/openapi.json", "--output-path", str(folder / "generated"),
        ],
        env=environment(PYTHONPATH=str(GENERATOR), PATH=search), cwd=folder,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    shown = result.stdout + result.stderr
    assert result.returncode == 0, shown
    # A part that the generator does not understand is left out with a warning.
    assert "WARNING" not in shown, shown
    assert "Unable" not in shown, shown
    return folder


def test_the_generated_client_has_every_operation(generated: Path):
    found = {path.stem for path in (generated / "generated" / "api").glob("*/*.py")}
    assert found - {"__init__"} == {str(one) for one in operations()}


def test_the_generated_client_works(generated: Path, single_server: Server):
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, single_server.url],
        env=environment(PYTHONPATH=str(generated)), cwd=generated,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    tokens = told.pop("tokens")
    assert single_server.post("/tokenize", {"prompt": "Hello, world"}).json()["tokens"] == tokens
    model = single_server.get("/v1/models").json()["data"][0]["id"]
    assert told == {
        "model": model, "text": "Hello, world", "prompt_ids": [tokens], "lengths": [4, 4],
        "chat_ids": 4, "chat_logprobs": 4, "role": "assistant", "refused": [400, "invalid_request"],
        "is_paused": False,
    }  # fmt: skip
