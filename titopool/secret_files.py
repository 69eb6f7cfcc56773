"""Files that hold keys, which other users of the host must not be able to read."""

import os
import stat

from titopool.errors import ConfigError

# A file of keys is short; the limit keeps a wrong file name from filling the memory.
MAX_BYTES = 2**20


def read_secret_file(path: str, setting: str) -> bytes:
    """The content of a file of keys.

    Args:
        setting: names the file in errors.

    Raises:
        ConfigError: the file cannot be read, is too long, or other users may read or write it.
            root's files may be readable for their group, as Kubernetes mounts secrets (the rule is
            PostgreSQL's for `ssl_key_file`).
    """
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{setting}: expected a file that can be read, got {error}") from None
    excess = stat.S_IMODE(status.st_mode) & (0o027 if status.st_uid == 0 else 0o077)
    if excess:
        raise ConfigError(
            f"{setting}: expected a file for its owner only, got mode "
            f"{stat.S_IMODE(status.st_mode):04o} of {path}; run `chmod 600 {path}`, and replace "
            "the keys if other users may have read them"
        )
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{setting}: expected at most {MAX_BYTES} bytes in {path}, got more")
    return content
