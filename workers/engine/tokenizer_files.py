"""What tells one tokenizer from another that lies in a folder of the same name."""

from hashlib import blake2b
from pathlib import Path

# Of a tokenizer of any kind, and of its chat template.
PATTERNS = (
    "tokenizer*", "*.model", "*.tiktoken", "tekken.json", "vocab*", "merges.txt",
    "added_tokens.json", "special_tokens_map.json", "chat_template*",
)  # fmt: skip


def digest_of_tokenizer(tokenizer: str) -> str:
    """Of the contents of its files; empty where `tokenizer` is no folder but a hub's name."""
    folder = Path(tokenizer)
    files = {file for pattern in PATTERNS for file in folder.glob(pattern) if file.is_file()}
    if not files:
        return ""
    digest = blake2b(digest_size=16)
    for file in sorted(files):
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()
