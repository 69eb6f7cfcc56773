"""Image files: accepted formats and shapes.

Front ends check every file before generation. Workers open files with the same function.
"""

from io import BytesIO

import PIL.Image
import PIL.PngImagePlugin

# Pillow's other formats are old or rare, or start other programs.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# Longer side over shorter side. Qwen's processors refuse more. Processors that scale the shorter
# side to a fixed length would make gigabytes of a longer image.
MAX_ASPECT_RATIO = 200

# Pillow's own limit is off: `app/inputs/images.py` compares the size with `max_image_pixels`.
PIL.Image.MAX_IMAGE_PIXELS = None
# Bytes of text in one PNG once decompressed, which costs seconds for each hundred million. Pillow
# reads all of it, and nobody uses it.
PIL.PngImagePlugin.MAX_TEXT_MEMORY = 4 * 2**20


def open_image(data: bytes) -> PIL.Image.Image:
    """Reads the header of an image file. Pillow reads the pixels on first access."""
    return PIL.Image.open(BytesIO(data), formats=FORMATS)


def check_file(data: bytes) -> tuple[int, int]:
    """Width and height of an image file.

    Raises:
        ValueError: not an image file of `FORMATS`, or a side is zero or too long.
    """
    try:
        with open_image(data) as image:
            width, height = image.size
            # Finds a truncated PNG by its checksums, without decoding it.
            image.verify()
    except Exception as error:
        # Pillow's readers raise errors of many types. The text of UnidentifiedImageError is useless.
        is_unknown = isinstance(error, PIL.UnidentifiedImageError)
        reason = "" if is_unknown else f": {type(error).__name__}: {error}"
        raise ValueError(
            f"expected an image file ({', '.join(FORMATS)}), got {len(data)} bytes that are not "
            f"an image{reason}"[:500]
        ) from None
    if min(width, height) < 1 or max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise ValueError(
            f"expected an image whose longer side is at most {MAX_ASPECT_RATIO} times the shorter, "
            f"got {width} x {height}"
        )
    return width, height
