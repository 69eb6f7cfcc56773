"""One server with the scripted model for all tests of tools and thoughts."""

import openai
import pytest

from harness.servers import running_server
from tests.clients.published import AGAINST_VLLM
from tests.conftest import ENGINE_OPTIONS
from tests.kit.models.scripted_model import make_scripted_model
from tests.kit.peers.scripted_server import Scripted
from tests.kit.peers.vllm_instead import instead
from tests.kit.peers.vllm_serve import vllm_server


@pytest.fixture(scope="package")
def scripted(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("scripted")
    ids = make_scripted_model(folder)
    options = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3", "--num-workers", "1")
    log = tmp_path_factory.mktemp("scripted-server") / "log"
    if AGAINST_VLLM:
        parsers = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
        with vllm_server(
            str(folder), log, enable_auto_tool_choice=True, enable_scale_out=True, **parsers
        ) as url:
            client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
            yield Scripted(instead(url), client, str(folder), ids)
        return
    with running_server(
        str(folder), *options, *ENGINE_OPTIONS, "--num-front-ends", "1", log=log
    ) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        yield Scripted(server, client, str(folder), ids)
