"""The greatest amount of memory in use on a GPU."""

import subprocess
import threading

INTERVAL_MS = 20


class GpuMemory:
    """Watches one GPU by `nvidia-smi`; without GPUs all figures are 0."""

    def __init__(self, gpu: str):
        """`gpu`: as nvidia-smi numbers it; empty: none."""
        self._peak = 0
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

    def peak(self) -> int:
        """The greatest number of bytes in use since the last call."""
        peak, self._peak = self._peak, 0
        return peak

    def close(self) -> None:
        """Ends the watch."""
        if self._process is not None:
            self._process.terminate()
