"""Random images for tests, and their encodings."""

import base64
import struct
import zlib
from io import BytesIO

import numpy as np
import PIL.Image

# The text of one image, as the chat template of each tiny model writes it.
PLACEHOLDERS = {"qwen": "<|vision_start|><|image_pad|><|vision_end|>", "smol": "<image>"}


def picture(width: int, height: int, seed: int = 0) -> PIL.Image.Image:
    """Random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return PIL.Image.fromarray(pixels)


def encoded(image: PIL.Image.Image, kind: str = "PNG", **options) -> str:
    """The image as a file in base64."""
    return base64.b64encode(file_of(image, kind, **options)).decode()


def file_of(image: PIL.Image.Image, kind: str = "PNG", **options) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def with_size(png: bytes, width: int, height: int) -> bytes:
    """A PNG whose header has another size than its pixels."""
    header = png[12:16] + struct.pack(">II", width, height) + png[24:29]
    return png[:12] + header + struct.pack(">I", zlib.crc32(header)) + png[33:]
