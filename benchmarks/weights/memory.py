"""The greatest amount of memory in use on a GPU."""

import subprocess
import threading

INTERVAL_MS = 20
SAMPLE_TIMEOUT_S = 10.0


class GpuMemory:
    """Watches one GPU by `nvidia-smi`."""

    def __init__(self, gpu: str):
        """`gpu`: as nvidia-smi numbers it; empty: none."""
        self._peak = self._at_rest = 0
        self._has_sample = threading.Event()
        self._process = None
        if gpu:
            self._process = subprocess.Popen(
                [
                    "nvidia-smi", f"--id={gpu}", "--query-gpu=memory.used",
                    "--format=csv,noheader,nounits", f"--loop-ms={INTERVAL_MS}",
                ],
                stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._peak = max(self._peak, int(line) * 2**20)
            self._has_sample.set()

    def begin(self) -> None:
        """What is in use now does not count any more."""
        if self._process is not None:
            self._peak = 0
            self._has_sample.clear()
            assert self._has_sample.wait(SAMPLE_TIMEOUT_S), "nvidia-smi reports no memory"
            self._at_rest, self._peak = self._peak, 0

    def peak(self) -> int | None:
        """The greatest number of bytes in use since the last call, beyond those at `begin`.

        None: unknown. Nobody watches, no sample came, or another process has given back memory.
        """
        peak, self._peak = self._peak, 0
        return None if self._process is None or peak < self._at_rest else peak - self._at_rest

    def close(self) -> None:
        """Ends the watch."""
        if self._process is not None:
            self._process.terminate()
