"""Requests that a hostile client, or a hostile page in a browser, sends."""

import binascii
import zlib

FOREIGN = {
    "form": {"Sec-Fetch-Site": "cross-site", "Content-Type": "text/plain"},
    "another-port-of-the-host": {"Sec-Fetch-Site": "same-site"},
    "origin": {"Origin": "https://evil.example"},
    "sandbox": {"Origin": "null"},
    "origin-of-another-port": {"Origin": "http://localhost:3000"},
    "rebinding": {"Host": "evil.example:8000", "Origin": "http://evil.example:8000"},
    "rebinding-read": {"Host": "evil.example", "Sec-Fetch-Site": "same-origin"},
    "lookalike": {"Host": "localhost.evil.example"},
}


def nested(num_levels: int):
    inner: dict = {}
    for _ in range(num_levels):
        inner = {"a": inner}
    return inner


CHUNKED = b"POST /generate/ HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"

BODIES = {
    "no-size": b"x\r\n{}\r\n0\r\n\r\n",
    "negative-size": b"-1\r\n{}\r\n0\r\n\r\n",
    "size-with-prefix": b"0x2\r\n{}\r\n0\r\n\r\n",
    "size-with-space": b"2 \r\n{}\r\n0\r\n\r\n",
    "longer-than-its-size": b"2\r\n{}x\r\n0\r\n\r\n",
    "extension": b"2;\r\n{}\r\n0\r\n\r\n",
    "trailer-with-nul": b"2\r\n{}\r\n0\r\nA: \0\r\n\r\n",
}


def png_chunk(kind: bytes, data: bytes) -> bytes:
    checksum = binascii.crc32(kind + data).to_bytes(4)
    return len(data).to_bytes(4) + kind + data + checksum


def png_with_text(num_mebibytes: int) -> bytes:
    """A PNG of one pixel with compressed texts of 1 MiB each."""
    text = png_chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(2**20 - 100)))
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", bytes.fromhex("00000001 00000001 08 02 00 00 00"))
        + text * num_mebibytes
        + png_chunk(b"IDAT", zlib.compress(bytes(4)))
        + png_chunk(b"IEND", b"")
    )
