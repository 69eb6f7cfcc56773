"""Images by TRL 1.16, SkyRL 0.4.0 and verifiers 0.4.0: the ids that /generate/ gives for the file.

`TRAINERS_AGAINST=vllm` sends the clients to vLLM's own server, and compares with titopool's.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.images import encoded, picture
from tests.clients.published import AGAINST_VLLM, run_client
from tests.clients.scripts import CLIENT, ROLLOUT
from tests.engine.images.conftest import NUM_TOKENS, Vision
from tests.kit.peers.trl_client import run_trl
from tests.kit.peers.vllm_serve import vllm_server

WIDE, LARGE = picture(168, 56, 2), picture(200, 140, 3)
OPENED = """
import base64, io
import PIL.Image

files = sys.argv[3:]
images = [PIL.Image.open(io.BytesIO(base64.b64decode(one))) for one in files]
"""


@pytest.fixture(scope="module")
def url(qwen: Vision, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of the server that the clients call."""
    if AGAINST_VLLM:
        log = tmp_path_factory.mktemp("vllm-serve") / "log"
        with vllm_server(qwen.folder, log, enable_scale_out=True) as theirs:
            yield theirs
    else:
        yield qwen.server.url


def expected(model: Vision, ids: list[int], images: list) -> Any:
    answer = model.server.generate(
        [ids], images=[[encoded(one) for one in images]], max_tokens=NUM_TOKENS, temperature=0
    )
    return answer["prompt_ids"][0], answer["completion_ids"][0], answer["logprobs"][0]


def test_trl_sends_expanded_ids_with_features(qwen: Vision, url: str):
    single = qwen.ids("Compare @ with @ now")
    ids, completion, logprobs = expected(qwen, single, [WIDE, LARGE])
    (placeholder,) = set(qwen.ids("@")) - set(qwen.ids("<|vision_start|><|vision_end|>"))
    script = f"""
import types
from trl.generation.vllm_generation import VLLMGeneration

features = client.image_features([images, None])
trainer = types.SimpleNamespace(processing_class=types.SimpleNamespace(image_token_id={placeholder}))
prompts = [{ids}, {single[:2]}]
placed = [
    VLLMGeneration._place_features(trainer, *one) for one in zip(features, prompts, strict=True)
]
answer(client.generate(prompts, placed, n=1, temperature=0.0, max_tokens={NUM_TOKENS}))
"""
    files = [encoded(WIDE), encoded(LARGE)]
    found = run_trl("1.16.0", url, OPENED + script, *files)
    assert found["prompt_ids"] == [ids, single[:2]]
    assert found["completion_ids"][0] == completion
    assert found["logprobs"][0] == [pytest.approx(one, abs=1e-5) for one in logprobs]
    assert found["logprob_token_ids"][0] == [[one] for one in completion]


def test_skyrl_samples_with_an_image(qwen: Vision, url: str):
    before, after = qwen.ids("<|vision_start|>"), qwen.ids("<|vision_end|> what?")
    ids, completion, _ = expected(qwen, qwen.ids("@ what?"), [WIDE])
    script = f"""
async def calls(client):
    chunks = [
        {{"type": "encoded_text", "tokens": {before}}},
        {{"type": "image", "data": sys.argv[2], "format": "png"}},
        {{"type": "encoded_text", "tokens": {after}}},
    ]
    return await client.sample({{"json": {{
        "prompt": {{"chunks": chunks}}, "num_samples": 1, "prompt_logprobs": True,
        "sampling_params": {{"max_tokens": {NUM_TOKENS}, "temperature": 0.0}},
    }}}})
"""
    found = run_client("skyrl", url, script + CLIENT, encoded(WIDE))
    (sequence,) = found["sequences"]
    assert sequence["tokens"] == completion
    assert len(found["prompt_logprobs"]) == len(ids)


def test_verifiers_sends_an_image_beside_ids(qwen: Vision, url: str, tmp_path: Path):
    from transformers import AutoTokenizer

    # Qwen3-VL's renderer looks up tokens that the tiny model's tokenizer lacks. None is sent.
    tokenizer = AutoTokenizer.from_pretrained(qwen.folder)
    tokens = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "</think>"]
    tokenizer.add_tokens(tokens)
    tokenizer.save_pretrained(tmp_path)
    image = "data:image/png;base64," + encoded(WIDE)
    question = [
        {"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": " what?"}
    ]  # fmt: skip
    sampling = {"temperature": 0.0, "max_tokens": NUM_TOKENS}
    script = f"""
answer(asyncio.run(rollouts(1, {sampling}, 1, {question}, renderer="Qwen3VL")))
"""
    ((turn,),) = run_client("verifiers", url, ROLLOUT + script, str(tmp_path))
    single = qwen.ids("<|im_start|>user\n@ what?<|im_end|>\n<|im_start|>assistant\n")
    ids, completion, logprobs = expected(qwen, single, [WIDE])
    assert turn["prompt_ids"] == ids
    assert turn["completion_ids"] == completion
    assert turn["logprobs"] == pytest.approx([one for (one,) in logprobs], abs=1e-5)
