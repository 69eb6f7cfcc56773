"""Downloads the model before the workers start, once for all of them: `python -m workers.supervisor.downloads`.

Runs in: a child of the supervisor, which may stop it at any time. The workers then load from the
hub's cache. The first word on standard output is the cause of a failure; progress goes to standard
error.
"""

import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from titopool.settings.logs import show
from titopool.settings.sources import from_environment
from workers.supervisor.hub import INDEX, Wanted, explain, needed_files, similar_name, wanted_model
from workers.supervisor.screen import Screen

POLL_S = 0.2
# Without a byte. The hub's client gives up earlier where a connection breaks.
STALL_TIMEOUT_S = 300.0
# Of the whole download; the hub's client repeats each broken connection by itself.
NUM_TRIES = 3
RETRY_DELAY_S = 2.0
NUM_AT_ONCE = 8
# Of the disk, besides the files.
SPARE_BYTES = 2**20


class DownloadFailed(Exception):
    """The message is one sentence for the user."""


class Download:
    """One model's files on their way into the cache."""

    def __init__(self, wanted: Wanted, screen: Screen):
        # Only here: the supervisor imports what this module imports at its top.
        from huggingface_hub import HfApi, constants
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
        self._wanted = wanted
        self._screen = screen
        self._api = HfApi(token=wanted.token)
        self._cache = Path(wanted.cache_dir or constants.HF_HUB_CACHE).expanduser()

    def run(self) -> None:
        """Returns once all files are in the cache.

        Raises:
            DownloadFailed: they are not, and the cache has no model to go on with.
        """
        model = self._wanted.model
        try:
            self._fetch()
        except DownloadFailed:
            raise
        except Exception as error:
            sentence = explain(
                error, model, str(self._cache), lambda: similar_name(self._api, model)
            )
            if not self._is_cached("config.json", self._wanted.revision):
                raise DownloadFailed(sentence) from error
            if type(error).__name__ != "OfflineModeIsEnabled":
                show(
                    f"titopool: {model}: expected the hub's list of its files, got "
                    f"{type(error).__name__}; the cached copy is used"
                )

    def _is_cached(self, name: str, revision: str | None) -> bool:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(
            self._wanted.model, name, cache_dir=self._cache, revision=revision
        )
        return isinstance(found, str)

    def _fetch(self) -> None:
        info = self._api.model_info(
            self._wanted.model, revision=self._wanted.revision, files_metadata=True, timeout=30
        )
        sizes = {one.rfilename: one.size or 0 for one in info.siblings or ()}
        needed = needed_files(sizes, self._wanted.load_format, self._read_index)
        missing = {
            name: size for name, size in needed.items() if not self._is_cached(name, info.sha)
        }
        if not missing:
            return
        total = sum(missing.values())
        self._check_space(total)
        before = self._bytes_of(complete=True)
        show(
            f"titopool: downloads {self._wanted.model} to {self._cache}: "
            f"{tqdm.format_sizeof(total, 'B')} in {len(missing)} file{'s'[: len(missing) > 1]}"
        )
        began = time.monotonic()
        self._watch(list(missing), total, before)
        self._screen.close()
        show(f"titopool: has downloaded {self._wanted.model} in {time.monotonic() - began:.1f} s")

    def _read_index(self) -> str:
        path = self._api.hf_hub_download(
            self._wanted.model, INDEX, revision=self._wanted.revision, cache_dir=self._cache
        )
        return Path(path).read_text()

    def _check_space(self, total: int) -> None:
        folder = next(one for one in (self._cache, *self._cache.parents) if one.exists())
        free = shutil.disk_usage(folder).free
        if free < total + SPARE_BYTES:
            raise DownloadFailed(
                f"{self._wanted.model}: expected {total / 1e9:.1f} GB free on the disk of {folder}, got "
                f"{free / 1e9:.1f} GB; free some, or set HF_HOME to a folder on another disk"
            )

    # ---- the transfer ----------------------------------------------------------------

    def _watch(self, names: list[str], total: int, before: int) -> None:
        failures: list[BaseException] = []

        def transfer() -> None:
            try:
                self._transfer(names)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=transfer, daemon=True)
        thread.start()
        started, last, last_at = time.time(), -1, time.monotonic()
        while thread.is_alive():
            thread.join(POLL_S)
            done = min(total, max(0, self._bytes_of(since=started) - before))
            if done != last:
                last, last_at = done, time.monotonic()
            elif time.monotonic() - last_at > STALL_TIMEOUT_S:
                raise DownloadFailed(
                    f"{self._wanted.model}: expected bytes of the hub, got none for "
                    f"{STALL_TIMEOUT_S:g} s; check the network, and start again: complete files stay"
                )
            self._screen.set("download", "model", done, total, unit="B")
            self._screen.tick()
        if failures:
            raise failures[0]

    def _transfer(self, names: list[str]) -> None:
        from huggingface_hub.errors import HfHubHTTPError

        for num_left in reversed(range(NUM_TRIES)):
            try:
                self._api.snapshot_download(
                    self._wanted.model, revision=self._wanted.revision, cache_dir=self._cache,
                    allow_patterns=names, max_workers=NUM_AT_ONCE,
                )  # fmt: skip
                return
            except Exception as error:
                status = getattr(getattr(error, "response", None), "status_code", 500)
                is_final = isinstance(error, HfHubHTTPError) and status < 500
                if is_final or not num_left:
                    raise
            time.sleep(RETRY_DELAY_S)

    def _bytes_of(self, *, complete: bool = False, since: float = 0.0) -> int:
        """Bytes of the model in the cache, in all revisions.

        Args:
            complete: without files on their way.
            since: of the files on their way only those that changed after this time.
        """
        folder = self._cache / f"models--{self._wanted.model.replace('/', '--')}" / "blobs"
        total = 0
        for path in folder.glob("*"):
            try:
                facts = path.stat()
            except OSError:
                # Just renamed.
                continue
            is_partial = path.suffix == ".incomplete"
            if not is_partial or (not complete and facts.st_mtime >= since - 1):
                total += facts.st_size
        return total


def end_with(parent_pid: int) -> None:
    """Ends this process, with all transfers, when the supervisor has ended."""
    while os.getppid() == parent_pid:
        time.sleep(POLL_S)
    os._exit(1)


def main() -> int:
    """Downloads what the settings in the environment name; returns the exit code."""
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    wanted = wanted_model(from_environment(), os.environ)
    if wanted is None:
        return 0
    screen = Screen()
    try:
        Download(wanted, screen).run()
        return 0
    except DownloadFailed as error:
        screen.close()
        print(error, flush=True)
        return 1


if __name__ == "__main__":
    code: Any = main()
    sys.stdout.flush()
    # Threads of a transfer must not keep the process alive.
    os._exit(code)
