"""Image files: which kinds are read, and how large one may be.

Front ends check every file before anything is generated, workers open it the same way.
"""

from io import BytesIO

import PIL.Image

# What Pillow reads here; its other formats are old, rare, or run other programs.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# Of the longer side to the shorter. Qwen's processors refuse more, and those that scale the
# shorter side to a fixed length would make an image of gigabytes.
MAX_ASPECT_RATIO = 200

# Sizes are checked below, with a limit that is a setting.
PIL.Image.MAX_IMAGE_PIXELS = None


def open_image(data: bytes) -> PIL.Image.Image:
    """The file's header; its pixels are read when they are asked for."""
    return PIL.Image.open(BytesIO(data), formats=FORMATS)


def check_file(data: bytes) -> tuple[int, int]:
    """Width and height of an image file.

    Raises:
        ValueError: it is none, or its size is impossible; says what was expected and what came.
    """
    try:
        with open_image(data) as image:
            width, height = image.size
            # A PNG's checksums: a file that was cut off is found without decoding it.
            image.verify()
    except Exception as error:
        # Pillow raises whatever its readers stumble over; this one has nothing to say.
        is_unknown = isinstance(error, PIL.UnidentifiedImageError)
        reason = "" if is_unknown else f": {type(error).__name__}: {error}"
        raise ValueError(
            f"expected an image file ({', '.join(FORMATS)}), got {len(data)} bytes that are "
            f"none{reason}"[:500]
        ) from None
    if min(width, height) < 1 or max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise ValueError(
            f"expected an image whose longer side is at most {MAX_ASPECT_RATIO} times the shorter, "
            f"got {width} x {height}"
        )
    return width, height
