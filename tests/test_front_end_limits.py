"""What one request may cost a front end: lines of its log, and time for its images."""

import binascii
import logging
import zlib

import pytest

from app.inputs.chat_messages import read_conversation
from titopool.wire.image_files import check_file


def test_malformed_tool_calls_are_one_line_of_the_log(caplog: pytest.LogCaptureFixture):
    call = {"function": {"name": "f", "arguments": "{"}}
    messages = [{"role": "assistant", "tool_calls": [call] * 100}] * 3
    with caplog.at_level(logging.WARNING):
        read = read_conversation(messages, "messages").messages
    assert read[2]["tool_calls"][99]["function"]["arguments"] == {}
    (line,) = [record.getMessage() for record in caplog.records]
    assert "300 tool calls" in line
    assert "messages[0].tool_calls[0]" in line


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


def test_a_png_with_much_text_is_refused_before_it_is_read():
    assert check_file(png_with_text(2)) == (1, 1)
    with pytest.raises(ValueError, match="text chunks"):
        check_file(png_with_text(60))
