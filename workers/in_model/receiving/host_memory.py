"""How much of the host's memory this process may still take.

Runs in: vLLM's processes that hold the model.
"""

from collections.abc import Iterator
from pathlib import Path

CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def free_host_bytes(cgroups: Path = CGROUPS, own_cgroup: Path = OWN_CGROUP) -> int:
    """Bytes that the host has free, and that its containers' limits (cgroup v2) leave this process.

    Files that the kernel has cached count as free.
    """
    import psutil

    return int(min([psutil.virtual_memory().available, *_left_in(cgroups, own_cgroup)]))


def _left_in(cgroups: Path, own_cgroup: Path) -> Iterator[int]:
    """What the limit of each cgroup above this process leaves."""
    try:
        # Version 2 has one line, `0::/path`.
        (path,) = (
            line.removeprefix("0::")
            for line in own_cgroup.read_text().splitlines()
            if line.startswith("0::")
        )
    except (OSError, ValueError):
        return
    folder = cgroups / path.strip("/")
    for one in (folder, *folder.parents):
        if not one.is_relative_to(cgroups):
            return
        try:
            # "max" is no limit, and the first folder has no file.
            limit = int((one / "memory.max").read_text())
            used = int((one / "memory.current").read_text())
            facts = dict(line.split() for line in (one / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        yield max(0, limit - used + int(facts.get("inactive_file", 0)))
