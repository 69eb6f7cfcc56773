"""A TCP proxy that simulates a network: connections can be cut, held or delayed."""

import asyncio
import contextlib


class Proxy:
    """Forwards connections from one address to another."""

    def __init__(self, host: str, port: int, target_port: int):
        self._host, self._port, self._target_port = host, port, target_port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        # Set while bytes are forwarded.
        self._open = asyncio.Event()
        self._open.set()
        self.delay_s = 0.0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connect, self._host, self._port)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """Aborts all connections, as the death of a process does."""
        for writer in list(self._writers):
            with contextlib.suppress(OSError):
                writer.transport.abort()

    def hold(self) -> None:
        """Forwards nothing and closes nothing, as in a network partition."""
        self._open.clear()

    def heal(self) -> None:
        self._open.set()
        self.delay_s = 0.0

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        await self._open.wait()
        try:
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.close()
            self._writers.discard(writer)
            return
        self._writers.add(to_writer)
        try:
            await asyncio.gather(self._copy(reader, to_writer), self._copy(to_reader, writer))
        finally:
            for one in (writer, to_writer):
                self._writers.discard(one)
                one.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self._open.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
