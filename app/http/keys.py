"""Clients' keys: from the settings, and from a file that may change while the server runs."""

import hashlib
import logging
import os
import re
import time
from collections.abc import Mapping
from typing import NamedTuple

from titopool.errors import ConfigError
from titopool.secret_files import read_secret_file
from titopool.settings.config import ServerConfig

logger = logging.getLogger(__name__)

CHECK_EVERY_S = 1.0
_LINE = re.compile(
    r"(?P<name>[\w.@-]{1,64})\s+(?P<key>\S+)(?P<admin>\s+admin)?(\s+weight=(?P<weight>[1-9]\d{0,2}))?",
    re.ASCII,
)


class Key(NamedTuple):
    """A key's name, for logs and metrics, and what it opens."""

    name: str
    # Whether it opens administrative routes.
    is_admin: bool
    # Its share of the slots, compared with other keys that have requests waiting.
    weight: int = 1


NO_KEY = Key("", is_admin=False)


class Keys:
    """The keys that are accepted now."""

    def __init__(self, config: ServerConfig):
        """Raises:
        ConfigError: the file of keys cannot be used.
        """
        self._path = config.api_key_file
        # Whether generating routes require a key, and administrative ones an administrator's. With
        # a file the latter holds always: else the end of its last such key would open these routes
        # to all others.
        self.guard_generation = bool(config.api_key or self._path)
        self.guard_administration = bool(config.admin_key or self._path)
        self._of_settings = {
            digest_of(text.encode()): Key(name, is_admin)
            for name, text, is_admin in (
                ("api_key", config.api_key, False),
                ("admin_key", config.admin_key, True),
            )
            if text
        }
        self._state = self._file_state()
        self._next_check = time.monotonic() + CHECK_EVERY_S
        self._use(read_keys(self._path) if self._path else {})

    def _use(self, of_file: Mapping[bytes, Key]) -> None:
        self._keys = {**of_file, **self._of_settings}

    def find(self, text: bytes) -> Key | None:
        """The key `text`; None if there is no such key.

        Looks up a digest: the time that this takes tells nothing about other keys.
        """
        self._follow_file()
        return self._keys.get(digest_of(text))

    def has(self, name: str) -> bool:
        """Whether a key has this name; "" is that of clients without a key."""
        self._follow_file()
        if not name:
            return not self.guard_generation
        return any(key.name == name for key in self._keys.values())

    def _follow_file(self) -> None:
        """Reads a file that has changed. A file that cannot be used is logged once."""
        if not self._path or time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + CHECK_EVERY_S
        state = self._file_state()
        if state == self._state:
            return
        self._state = state
        try:
            keys = read_keys(self._path)
        except ConfigError as error:
            logger.error("the former keys stay in use: %s", error)
        else:
            self._use(keys)
            logger.info("read %d keys of %s", len(keys), self._path)

    def _file_state(self) -> tuple[int, ...] | None:
        """Differs when the file has been written, replaced, removed or got another mode."""
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size


def digest_of(key: bytes) -> bytes:
    """What `Keys` holds in place of a key."""
    return hashlib.sha256(key).digest()


def read_keys(path: str) -> Mapping[bytes, Key]:
    """The keys of a file, by their digests.

    A line is `NAME KEY [admin] [weight=N]`. Empty lines and lines that begin with # are skipped.
    Several keys may have one name, so that a client can change its key without a gap.

    Raises:
        ConfigError: the file cannot be read, has no key, has a line of another form, or two weights
            for one name.
    """
    keys: dict[bytes, Key] = {}
    weights: dict[str, int] = {}
    content = read_secret_file(path, "api_key_file").decode("latin-1")
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = _LINE.fullmatch(line.strip())
        # The line is not shown: it may hold a key.
        if not (found and found["key"].isascii()):
            raise ConfigError(
                f"api_key_file: expected lines `NAME KEY [admin] [weight=N]` in {path}, names of "
                f"letters, digits and .@_-, N from 1 to 999, got another form in line {number}"
            )
        key = Key(found["name"], bool(found["admin"]), int(found["weight"] or 1))
        if weights.setdefault(key.name, key.weight) != key.weight:
            raise ConfigError(
                f"api_key_file: expected one weight for all keys named {key.name!r} in {path}, got "
                f"another one in line {number}"
            )
        digest = digest_of(found["key"].encode())
        if digest in keys:
            raise ConfigError(
                f"api_key_file: expected each key once in {path}, got one again in line {number}"
            )
        keys[digest] = key
    if not keys:
        raise ConfigError(f"api_key_file: expected at least one key in {path}, got none")
    return keys
