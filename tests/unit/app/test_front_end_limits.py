"""What one request may cost a front end: lines of its log, and time for its images."""

import logging

import pytest

from app.inputs.chat_messages import read_conversation
from harness.hostile_requests import png_with_text
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


def test_a_png_with_much_text_is_refused_before_it_is_read():
    assert check_file(png_with_text(2)) == (1, 1)
    with pytest.raises(ValueError, match="text chunks"):
        check_file(png_with_text(60))
