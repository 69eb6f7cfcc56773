"""A server without a key refuses requests of web pages; needs no workers."""

from typing import Any

import pytest

from app import create_app
from app.http.browsers import is_loopback
from harness.hostile_requests import FOREIGN
from titopool.settings.config import ServerConfig

OWN = {
    "no-browser": {},
    "typed": {"Sec-Fetch-Site": "none"},
    "own-page": {"Origin": "http://localhost:9", "Host": "localhost:9", "Sec-Fetch-Site": "same-origin"},
    "forwarded-port": {"Host": "127.0.0.1:9000"},
    "address": {"Host": "10.0.0.7:80"},
    "ipv6": {"Host": "[::1]:8000"},
    "no-host": {"Host": ""},
}  # fmt: skip


def statuses(headers: dict[str, str], **settings: Any) -> set[int]:
    """Of a post that pauses, one that generates, which ends with 500 outside of gunicorn, and a probe."""
    client = create_app(ServerConfig(**settings)).test_client()
    answers = [
        client.post("/pause", data=b"{", headers=headers),
        client.post("/v1/responses", data=b"{}", headers=headers),
        client.get("/live", headers=headers),
    ]
    for answer in answers:
        if answer.status_code == 403:
            assert answer.json["error"]["code"] == "foreign_page"
            assert "api_key_file" in answer.json["error"]["message"]
    return {answer.status_code for answer in answers}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_foreign_page_is_refused(case: str):
    assert statuses(FOREIGN[case]) == {403}


@pytest.mark.parametrize("case", OWN)
def test_other_clients_are_served(case: str):
    assert statuses(OWN[case]) == {400, 500, 200}


def test_an_admin_key_alone_leaves_the_check_in_place():
    assert statuses(FOREIGN["form"], admin_key="trainer") == {403}


def test_a_server_with_a_key_needs_no_check():
    assert statuses(FOREIGN["rebinding"], api_key="secret") == {401, 200}


def test_an_allowed_host_is_served_and_its_pages_too():
    headers = {"Host": "Train.example:443", "Origin": "https://train.example"}
    assert statuses(headers) == {403}
    assert statuses(headers, allowed_hosts=("train.example",)) == {400, 500, 200}
    assert statuses({"Host": "other.example"}, allowed_hosts=("train.example",)) == {403}


def test_beyond_loopback_names_are_checked_only_against_allowed_hosts():
    host = {"Host": "node-7.cluster"}
    assert statuses(host, host="0.0.0.0") == {400, 500, 200}
    assert statuses(host, host="0.0.0.0", allowed_hosts=("localhost",)) == {403}
    assert statuses(FOREIGN["form"], host="0.0.0.0") == {403}
    assert statuses(FOREIGN["origin"], host="0.0.0.0") == {403}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback(host: str):
    assert is_loopback(host)
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "name.example", "")))
