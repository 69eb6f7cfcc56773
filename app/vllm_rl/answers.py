"""Answers of vLLM's routes for reinforcement learning."""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from titopool.answers.weights import LostWorker, Seconds


class Finished(msgspec.Struct, kw_only=True):
    """A finish: with the fields of a commit, unless parts of layers wait for the rest."""

    message: str
    waits_for: str | UnsetType = UNSET
    version: int | UnsetType = UNSET
    previous_version: int | UnsetType = UNSET
    loaded: int | UnsetType = UNSET
    staging: str | UnsetType = UNSET
    update_s: Seconds | UnsetType = UNSET
    paused_s: Seconds | UnsetType = UNSET
    prepare_s: Seconds | UnsetType = UNSET
    apply_s: Seconds | UnsetType = UNSET
    lost: list[LostWorker] | UnsetType = UNSET
    checksum: str | UnsetType = UNSET


class ServerInfo(msgspec.Struct, kw_only=True):
    """Settings that trainers read: an object with `config_format=json`, else its JSON as a string."""

    vllm_config: str | dict[str, Any]


class Labelled(msgspec.Struct, kw_only=True):
    """The version that serves has another label."""

    success: bool
    new_version: str


class Checksums(msgspec.Struct, kw_only=True):
    """Digests by the name of a parameter."""

    checksums: dict[str, str]


class Compared(msgspec.Struct, kw_only=True):
    """Whether the digests are those of the baseline."""

    match: bool
    mismatches: list[str]
