"""The files in `static/`, read once, under an address that changes with their content."""

import hashlib
import mimetypes
from pathlib import Path
from typing import NamedTuple

STATIC = Path(__file__).with_name("static")
# Python's table depends on the host's.
TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


class Asset(NamedTuple):
    """A file's content, its media type, and its digest, which is its ETag."""

    content: bytes
    mimetype: str
    digest: str


def read_assets(folder: Path = STATIC) -> dict[str, Asset]:
    """All files below `folder`, by their paths in it."""
    return {
        path.relative_to(folder).as_posix(): read_asset(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def read_asset(path: Path) -> Asset:
    content = path.read_bytes()
    guessed = TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0]
    return Asset(content, guessed or "text/plain", digest_of(content))


def version_of(assets: dict[str, Asset]) -> str:
    """Differs when any of the files does."""
    listed = "".join(f"{name} {asset.digest}\n" for name, asset in assets.items())
    return digest_of(listed.encode())


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
