"""A tiny Qwen3 with random weights, which is served when no model is given.

The weights come from a fixed seed, so the model generates nonsense. It shows that a server runs.
Tests use it because it starts in seconds and transformers reproduces its numbers.
`python -m titopool.demo_model FOLDER` writes the model to a folder.
"""

import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

VOCAB_SIZE = 2048
# vLLM's options for this model. With float32 vLLM reproduces transformers' numbers.
ENGINE_ARGV = ["--dtype", "float32", "--max-model-len", "2048"]

# Trained once on source code, and kept: tests and the README contain its token ids.
TOKENIZER = Path(__file__).with_name("demo_tokenizer.json")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def demo_model_folder() -> str:
    """The demo model's folder in the user's cache; created if it does not exist."""
    digest = hashlib.sha256(Path(__file__).read_bytes() + TOKENIZER.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "titopool" / f"demo-qwen3-{digest.hexdigest()[:12]}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".draft-"))
        try:
            make_model(draft)
            # Workers that start together may each make a model. The first rename wins.
            draft.rename(folder)
        except OSError:
            if not folder.exists():
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return str(folder)


def make_model(folder: str | Path, *, seed: int = 0, **config_options: Any) -> None:
    """Writes a random Qwen3 with its tokenizer to `folder`.

    Args:
        seed: seed of the random weights.
        config_options: fields of transformers' Qwen3Config in place of the tiny shape's.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    make_tokenizer(folder)
    options: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        # Wider than the usual 0.02, so that the probabilities of tokens differ clearly.
        "initializer_range": 0.05,
        "eos_token_id": 0,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**(options | config_options)))
    model.to(torch.float32).save_pretrained(folder)


def make_tokenizer(folder: str | Path) -> None:
    """Writes a byte-level BPE tokenizer of `VOCAB_SIZE` tokens to `folder`."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(TOKENIZER)),
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)


if __name__ == "__main__":
    make_model(sys.argv[1])
