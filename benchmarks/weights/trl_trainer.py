"""TRL's unchanged client: sends one of two models for each line of its input.

    python trl_trainer.py URL FOLDER DTYPE DEVICE PORT

Prints `{}` when the group has formed, then the seconds of each update.
"""

import importlib
import importlib.util
import inspect
import json
import sys
import time
import types
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def client_class() -> Any:
    """`VLLMClient`, without TRL's package initializers, which import TRL's trainers and datasets."""
    found = importlib.util.find_spec("trl")
    assert found is not None
    assert found.origin is not None
    folder = Path(found.origin).parent
    for name in ("trl", "trl.generation"):
        package = types.ModuleType(name)
        package.__path__ = [str(folder.parent.joinpath(*name.split(".")))]
        sys.modules[name] = package
    return importlib.import_module("trl.generation.vllm_client").VLLMClient


def main() -> None:
    url, folder, dtype, device, port = sys.argv[1:]
    torch.cuda.set_device(int(device))
    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.device("cuda", int(device)):
            config = AutoConfig.from_pretrained(folder)
            models.append(AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)))
    VLLMClient = client_class()
    accepted = inspect.signature(VLLMClient).parameters
    options = {"connection_timeout": 20} if "connection_timeout" in accepted else {}
    client = VLLMClient(base_url=url, group_port=int(port), **options)
    client.init_communicator(device=int(device))
    print("{}", flush=True)
    for line in sys.stdin:
        torch.cuda.synchronize()
        began = time.monotonic()
        client.update_model_params(models[int(line)])
        client.reset_prefix_cache()
        print(json.dumps({"total_s": time.monotonic() - began}), flush=True)
    client.close_communicator()


main()
