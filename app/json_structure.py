"""What JSON consists of, counted in pieces before it is decoded, since decoding makes no pause."""

import numpy as np

# Bytes of memory for one byte of a body: the body, its strings, and files and messages made of them.
BYTES_PER_BYTE = 3
# The same for one byte of a body with other characters than ASCII, whose strings take four each.
BYTES_PER_WIDE_BYTE = 6
# A number with its place in a list, after each comma; a list or an object with copies, of which few
# may be alive at once because a garbage collection visits each (0.3 s for a million).
BYTES_PER_COMMA = 44
BYTES_PER_CONTAINER = 1024
# Keys of an object, and the memory of each further one.
KEYS_PER_CONTAINER = 8
BYTES_PER_KEY = 200
# So many in a piece count as brackets or colons of the structure, wherever they stand.
FEW = 16


class _Text:
    """Tells the structure of JSON from what stands in its strings, piece after piece."""

    def __init__(self) -> None:
        self._is_in_string = False
        # A backslash whose escaped character is in the next piece.
        self._cut = b""

    def read(self, piece: bytes) -> np.ndarray:
        """uint8: the piece without escaped quotes and backslashes."""
        piece, self._cut = self._cut + piece, b""
        if b"\\" in piece:
            piece = piece.replace(rb"\\", b"").replace(rb"\"", b"")
            if piece.endswith(b"\\"):
                piece, self._cut = piece[:-1], b"\\"
        return np.frombuffer(piece, np.uint8)

    def outside(self, is_quote: np.ndarray) -> np.ndarray:
        """bool: which characters of the present piece stand outside of strings."""
        # The number of quotes so far; only whether it is odd counts.
        quotes = np.cumsum(is_quote, dtype=np.uint8)
        mask: np.ndarray = (quotes & 1) == np.uint8(self._is_in_string)
        return mask

    def end(self, is_quote: np.ndarray) -> None:
        """Ends the present piece."""
        self._is_in_string ^= np.count_nonzero(is_quote) % 2 == 1


class Structure:
    """Counts lists, objects and keys."""

    def __init__(self) -> None:
        self.num_containers = 0
        self.num_keys = 0
        self._text = _Text()

    @property
    def num_more_keys(self) -> int:
        """Keys beyond `KEYS_PER_CONTAINER` for each list and object."""
        return max(0, self.num_keys - KEYS_PER_CONTAINER * self.num_containers)

    def add(self, piece: bytes) -> int:
        """Counts the next piece; returns the bytes of memory that it will take."""
        containers_before, more_keys_before = self.num_containers, self.num_more_keys
        per_byte = BYTES_PER_BYTE if piece.isascii() else BYTES_PER_WIDE_BYTE
        characters = self._text.read(piece)
        is_quote, is_colon = characters == ord('"'), characters == ord(":")
        # In ASCII, `[` and `{` differ in one bit.
        is_opening = (characters & 0xDF) == ord("[")
        num_containers, num_keys = np.count_nonzero(is_opening), np.count_nonzero(is_colon)
        if max(num_containers, num_keys) > FEW:
            is_outside = self._text.outside(is_quote)
            num_containers = np.count_nonzero(is_opening & is_outside)
            num_keys = np.count_nonzero(is_colon & is_outside)
        self._text.end(is_quote)
        self.num_containers += int(num_containers)
        self.num_keys += int(num_keys)
        return int(
            per_byte * len(piece)
            + BYTES_PER_COMMA * np.count_nonzero(characters == ord(","))
            + BYTES_PER_CONTAINER * (self.num_containers - containers_before)
            + BYTES_PER_KEY * max(0, self.num_more_keys - more_keys_before)
        )


class CommasOfList:
    """Counts the commas between the elements of a list, without those in the elements."""

    def __init__(self) -> None:
        self.count = 0
        self._depth = 0
        self._text = _Text()

    def add(self, piece: bytes) -> None:
        characters = self._text.read(piece)
        is_quote = characters == ord('"')
        is_outside = self._text.outside(is_quote)
        self._text.end(is_quote)
        is_opening = is_outside & ((characters & 0xDF) == ord("["))
        is_closing = is_outside & ((characters & 0xDF) == ord("]"))
        steps = is_opening.astype(np.int8) - is_closing.astype(np.int8)
        depths = self._depth + np.cumsum(steps, dtype=np.int64)
        is_comma = is_outside & (characters == ord(","))
        self.count += int(np.count_nonzero(is_comma & (depths == 1)))
        self._depth = int(depths[-1]) if len(depths) else self._depth
