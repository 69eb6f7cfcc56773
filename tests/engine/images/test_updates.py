"""Weight updates of models with image input: transformers' names, no cached old images."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText
from vllm.v1.core.sched import output

from harness.images import encoded, picture
from harness.servers import Server, need_gpus
from tests.engine.images.conftest import GREEDY, NUM_TOKENS, TOLERANCE, Vision
from tests.kit.models import reference
from tests.kit.models.weights import weights_client
from titopool.client.weights_client import WeightsError

IMAGE = picture(84, 112)


def assert_sees(server: Server, folder: str, text: str) -> None:
    """The model's output for the image equals transformers' with the weights in `folder`."""
    expected = reference.see(folder, text, [IMAGE], NUM_TOKENS)
    answer = server.generate([expected.prompt_ids], images=[[encoded(IMAGE)]], **GREEDY)
    assert answer["completion_ids"] == [expected.completion_ids]
    logprobs = [entry[0] for entry in answer["logprobs"][0]]
    assert torch.allclose(torch.tensor(logprobs), torch.tensor(expected.logprobs), atol=TOLERANCE)


def test_an_update_reaches_the_vision_tower_and_its_caches(model: Vision, tmp_path: Path):
    need_gpus(2)
    server, original, other = model.server, model.folder, str(tmp_path / "other")
    shutil.copytree(original, other)
    changed = AutoModelForImageTextToText.from_pretrained(original, dtype=torch.float32)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    changed.save_pretrained(other)
    text = model.text("look at @ and say what it is")
    client = weights_client(server, timeout_s=30)
    assert_sees(server, original, text)
    # The names of transformers' module, not of the checkpoint.
    if hasattr(output, "strip_covered_mm_data"):
        # vLLM 0.32 loses the images of requests that are kept, and ends.
        with pytest.raises(WeightsError) as caught:
            client.update(changed.named_parameters(), policy="keep")
        assert caught.value.status == 400
        assert "drain or abort" in str(caught.value)
    result = client.update(changed.named_parameters(), policy="drain")
    assert result["missing"] == []
    assert_sees(server, other, text)
    # Restores the weights for other tests on this server.
    old = AutoModelForImageTextToText.from_pretrained(original, dtype=torch.float32)
    client.update(old.named_parameters(), policy="drain")
    assert_sees(server, original, text)
    client.close()
