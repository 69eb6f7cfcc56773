"""LoRA adapters of one worker, by name and version, which are swapped while requests run.

Runs in: each worker process, on its event loop. A new version is loaded while the old one serves,
then takes over its name. Requests in flight finish with the old version, which is removed
after the last of them. vLLM's `load_inplace` is not used: vLLM 0.25 keeps keys and values of the
old weights. Requests get loaded versions only: a request for an adapter that cannot be loaded ends the
engine of every version of vLLM.
"""

import asyncio
import itertools
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from titopool.errors import Conflict, InvalidRequest, ModelNotFound
from titopool.wire.pool_state import AdapterRecord
from workers.in_model.checkpoint_files import ADAPTER_FILES, check_files

logger = logging.getLogger(__name__)

# vLLM reads a few megabytes and copies them to each of its processes.
LOAD_TIMEOUT_S = 50.0


# Options of PEFT with which an adapter computes something else, or which change the base weights.
CHANGING = (
    "rank_pattern", "alpha_pattern", "lora_bias", "init_lora_weights", "alora_invocation_tokens",
    "layer_replication", "use_bdlora", "use_qalora",
)  # fmt: skip
# Of `init_lora_weights`, as in vLLM 0.32's `PEFTHelper`: with these a saved adapter is a plain one.
PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")


def ignored_options(config: dict[str, Any]) -> list[str]:
    """The options of `adapter_config.json` that the installed vLLM ignores although they count.

    vLLM before 0.32 reads none of `CHANGING`; a later one supports an option or refuses it.
    """
    asked = [name for name in CHANGING if _is_asked(name, config.get(name))]
    if not asked:
        # Importing vLLM's module takes seconds where nothing else of vLLM is there.
        return []
    from vllm.lora.peft_helper import PEFTHelper

    read = {one.name for one in fields(PEFTHelper)}
    return [name for name in asked if name not in read]


def _is_asked(name: str, value: Any) -> bool:
    if name == "init_lora_weights":
        return isinstance(value, str) and value.lower() not in PLAIN_INITS
    return bool(value)


@dataclass(eq=False)
class Adapter:
    """One version of an adapter that vLLM has loaded."""

    name: str
    version: int
    # vLLM's id, never reused: its caches are keyed by it.
    adapter_id: int
    folder: str
    # Digest of its files.
    files: str
    num_requests: int = 0
    is_retired: bool = False

    def request(self) -> Any:
        """The `lora_request` of AsyncLLM.generate."""
        from vllm.lora.request import LoRARequest

        return LoRARequest(
            lora_name=f"{self.name}@{self.version}.{self.adapter_id}",
            lora_int_id=self.adapter_id,
            lora_path=self.folder,
        )


class Adapters:
    """The adapters of one AsyncLLM."""

    def __init__(self, llm: Any):
        self._llm = llm
        lora = llm.vllm_config.lora_config
        # vLLM evicts further adapters and reads them again, from folders that may have been removed.
        self.limit = (lora.max_cpu_loras or lora.max_loras) if lora else 0
        self._max_rank = lora.max_lora_rank if lora else 0
        self._ids = itertools.count(1)
        self._serving: dict[str, Adapter] = {}
        self._loaded: dict[tuple[str, int], Adapter] = {}
        # The greatest version that has served under each name.
        self._served: dict[str, int] = {}
        self._retired: set[Adapter] = set()
        self._removals: set[asyncio.Task[None]] = set()

    @property
    def versions(self) -> dict[str, int]:
        """The version that serves under each name."""
        return {name: one.version for name, one in self._serving.items()}

    def record_of(self, name: str) -> AdapterRecord:
        """The adapter that serves under `name`, for workers that missed its load."""
        adapter = self._serving[name]
        return AdapterRecord(adapter.version, adapter.folder, adapter.files)

    @property
    def latest_versions(self) -> dict[str, int]:
        """The greatest version under each name, serving or not, also if it was unloaded.

        So a version that the server counts means one adapter for as long as a worker lives.
        """
        latest = dict(self._served)
        for name, version in self._loaded:
            latest[name] = max(version, latest.get(name, 0))
        return latest

    def is_loaded(self, name: str, version: int) -> bool:
        """Whether a version is loaded and does not serve yet."""
        return (name, version) in self._loaded

    async def load(self, name: str, version: int, folder: str, files: str = "") -> str:
        """Loads a version; the current one keeps serving. Returns the digest of the files.

        Args:
            files: the digest that they have elsewhere; "": unknown.

        Raises:
            InvalidRequest: the engine cannot load an adapter from the folder.
            Conflict: the version is loaded already, the engine holds no further adapter, or the
                files are others than `files`, or change meanwhile.
        """
        files = await check_files(folder, files, is_adapter=True)
        if self.is_loaded(name, version) or self.versions.get(name) == version:
            raise Conflict(f"lora_name: {name} has version {version} already; load another version")
        num = len(self._serving) + len(self._loaded) + len(self._retired)
        if num >= self.limit:
            raise Conflict(
                f"lora_name: expected fewer than {self.limit} loaded adapters, got {num}, including those "
                "that requests in flight use; unload one, or start with a greater --max-cpu-loras"
            )
        self._check(Path(folder))
        adapter = Adapter(name, version, next(self._ids), folder, files)
        self._loaded[name, version] = adapter
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                await self._llm.add_lora(adapter.request())
        except Exception as error:
            del self._loaded[name, version]
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise InvalidRequest(
                f"lora_path: the engine refused the adapter: {lines[-1][:300]}", param="lora_path"
            ) from error
        try:
            return await check_files(folder, files, is_adapter=True)
        except Conflict:
            self.drop(name, version)
            raise

    def _check(self, folder: Path) -> None:
        missing = [name for name in ADAPTER_FILES if not (folder / name).is_file()]
        if missing:
            raise InvalidRequest(
                f"lora_path: expected {' and '.join(ADAPTER_FILES)} in the folder, {missing[0]} is missing",
                param="lora_path",
            )
        try:
            config = dict(json.loads((folder / ADAPTER_FILES[0]).read_bytes()))
        except (ValueError, TypeError, OSError):
            config = {}
        rank = config.get("r")
        if not isinstance(rank, int) or not 0 < rank <= self._max_rank:
            raise InvalidRequest(
                f"lora_path: expected a rank `r` from 1 to {self._max_rank} (--max-lora-rank) in "
                f"adapter_config.json, got {rank}",
                param="lora_path",
            )
        if ignored := ignored_options(config):
            raise InvalidRequest(
                "lora_path: expected options that this version of vLLM reads, got "
                f"{', '.join(ignored)} in adapter_config.json, which it ignores: it would compute "
                "another adapter; merge the adapter into the weights that you send (WeightsClient: "
                "update(model), or model.merge_and_unload()), or start the server with vLLM 0.32 or "
                "later, which knows patterns and refuses the others",
                param="lora_path",
            )

    def switch(self, name: str, version: int) -> None:
        """Serves a loaded version under `name` from now on; does nothing if it serves already."""
        if self.versions.get(name) == version:
            return
        adapter = self._loaded.pop((name, version), None)
        if adapter is None:
            raise Conflict(
                f"lora_name: expected {name} version {version} to be loaded; load it first"
            )
        self._retire(self._serving.get(name))
        self._serving[name] = adapter
        self._served[name] = max(version, self._served.get(name, 0))
        logger.info("adapter %s serves version %d", name, version)

    def drop(self, name: str, version: int) -> None:
        """Removes a loaded version that does not serve."""
        self._retire(self._loaded.pop((name, version), None))

    def unload(self, name: str) -> int:
        """Stops serving `name`; returns the version that served."""
        adapter = self._serving.pop(name, None)
        if adapter is None:
            raise ModelNotFound(
                f"lora_name: expected one of {', '.join(self._serving) or 'none'}, got {name!r}",
                param="lora_name",
            )
        self._retire(adapter)
        return adapter.version

    @contextmanager
    def use(self, name: str) -> Iterator[Adapter]:
        """The adapter that serves now; it stays loaded until the block ends."""
        adapter = self._serving.get(name)
        if adapter is None:
            raise ModelNotFound(
                f"expected a loaded adapter, {name!r} was unloaded; load it again", param="model"
            )
        adapter.num_requests += 1
        try:
            yield adapter
        finally:
            adapter.num_requests -= 1
            if adapter.is_retired:
                self._remove_unused(adapter)

    def _retire(self, adapter: Adapter | None) -> None:
        if adapter is not None:
            adapter.is_retired = True
            self._retired.add(adapter)
            self._remove_unused(adapter)

    def _remove_unused(self, adapter: Adapter) -> None:
        if adapter.num_requests == 0:
            task = asyncio.get_running_loop().create_task(self._remove(adapter))
            self._removals.add(task)
            task.add_done_callback(self._removals.discard)

    async def _remove(self, adapter: Adapter) -> None:
        try:
            await self._llm.remove_lora(adapter.adapter_id)
        except Exception:
            logger.warning("adapter %s could not be removed", adapter.name, exc_info=True)
        self._retired.discard(adapter)
