"""Images of `/inference/v1/generate` and renders, without a worker."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gevent
import msgspec
import numpy as np
import orjson
import pytest

from app.call.jobs import Prompt
from app.inputs.features import features_of
from app.inputs.images import PromptImages
from app.pool.records import OpenJob
from app.pool.request import Request
from app.route.decoding import decode_body
from app.vllm.answers import TokensRequest, whole_answer
from app.vllm.bodies import GENERATE_BODY
from app.vllm.prompt_images import images_of_tokens
from app.vllm.stream import TokensEvents
from harness.images import file_of, picture
from tests.kit.workers.pools import FACTS
from titopool.errors import InvalidRequest
from titopool.settings.config import ServerConfig
from titopool.settings.sampling import SamplingOptions, encode_options
from titopool.wire.messages import Image, ImageFacts, Job

FILES = [file_of(picture(56, 56, seed)) for seed in range(3)]
IMAGES = [Image(one, b"") for one in FILES]
RANGES = [(0, 4), (5, 4), (9, 4)]
VISION = msgspec.structs.replace(FACTS, images=ImageFacts(6, [7], has_placeholders=True))


def fields_of(**fields: Any):
    body = {"token_ids": [7] * 13, "sampling_params": {}, **fields}
    return decode_body(msgspec.json.encode(body), GENERATE_BODY)[0]


def num_turns(function: Callable[[], object]) -> int:
    """How often another greenlet runs while `function` does."""
    turns = [0]

    def take_turns() -> None:
        while True:
            turns[0] += 1
            gevent.sleep(0)

    other = gevent.spawn(take_turns)
    try:
        function()
    finally:
        other.kill()
    return turns[0]


def test_other_requests_run_between_the_images_of_features():
    assert num_turns(lambda: features_of(IMAGES, RANGES)) >= len(FILES)
    fields = fields_of(features=features_of(IMAGES, RANGES))
    config = ServerConfig()
    # Once for reading an image, and once for its hash.
    assert num_turns(lambda: images_of_tokens(fields, VISION, config)) >= 2 * len(FILES)


def test_a_hash_of_another_file_is_refused():
    features = features_of(IMAGES, RANGES)
    features["mm_hashes"]["image"][2] = "0" * 64
    with pytest.raises(
        InvalidRequest, match=r"mm_hashes\.image\[2\]: expected \w{64}, .* got '0000"
    ):
        images_of_tokens(fields_of(features=features), VISION, ServerConfig())


def ended_early(num_images: int, *, is_streamed: bool) -> tuple[TokensRequest, Request]:
    """A request with `content_parts` whose job an abort ends in the front end's queue."""
    parts = [{"type": "image_url", "url": "data:,"}] * num_images
    ids = np.array([7] * 3, np.int32)
    request: Any = TokensRequest(
        SimpleNamespace(id="a", facts=FACTS, link=SimpleNamespace(label_of=str)),
        fields_of(content_parts=parts, return_token_ids=True),
        SamplingOptions(),
        Prompt(ids, "token_ids", PromptImages(IMAGES[:num_images])),
        "",
    )
    job = Job(1, 1, ids.tobytes(), 1, 9, encode_options(request.options), is_streamed=is_streamed)
    pending = Request([job])
    OpenJob(job, pending, 0).end_as_aborted(3, None)
    return request, pending


@pytest.mark.parametrize("num_images, ids", [(2, None), (0, [7, 7, 7])])
def test_a_prompt_whose_images_were_not_placed_is_not_shown(num_images: int, ids: list[int] | None):
    request, pending = ended_early(num_images, is_streamed=False)
    answer = orjson.loads(b"".join(whole_answer(request, pending.take_results())))
    request, pending = ended_early(num_images, is_streamed=True)
    (event,) = TokensEvents(request).write_chunks(pending.take_chunks())
    for shown in (answer, event):
        assert shown["choices"][0]["finish_reason"] == "abort"
        assert (shown["prompt_token_ids"], shown["mm_placeholders"]) == (ids, None)
