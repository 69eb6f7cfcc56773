"""Hosts of a network of their own: network namespaces of Linux, joined by a bridge.

The test's process is on the network too, so that it can be a client. Needs root and iproute2.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from harness.servers import REPOSITORY, environment
from tests.all.system.packages import path_of

# Documentation's ranges (RFC 5737, RFC 3849): no route of the machine leads there.
IPV4, IPV6 = "198.51.100", "2001:db8:77:"
# Of the test's own process.
TEST_HOST = 254
INTERFACE = "eth0"


class Network:
    """Hosts by name; each has an IPv4 and an IPv6 address."""

    def __init__(self, folder: Path, names: list[str]):
        """Args:
        folder: for the logs of programs.
        """
        self._folder = folder
        self._tag = f"tt{os.getpid() % 100_000}"
        self._numbers = {name: number for number, name in enumerate(names, start=1)}
        self._started: list[subprocess.Popen[bytes]] = []
        self._names: dict[str, list[str]] = {}
        self._switch = f"{self._tag}-switch"
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        self._ip("netns", "add", self._switch)
        self._ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        self._ip("-n", self._switch, "link", "set", "bridge", "up")
        for name, number in self._numbers.items():
            space = self.namespace(name)
            self._ip("netns", "add", space)
            self._plug(f"port{number}", INTERFACE, space)
            self._address(number, INTERFACE, "-n", space)
            self._ip("-n", space, "link", "set", "lo", "up")
            # `ip netns exec` shows it as /etc/hosts.
            Path(f"/etc/netns/{space}").mkdir(parents=True)
        self._plug("port-test", f"{self._tag}-test", "")
        self._address(TEST_HOST, f"{self._tag}-test")
        self.set_names({})

    def _plug(self, port: str, interface: str, space: str) -> None:
        """A cable from the switch to an interface of a host; "": the test's."""
        end = ["netns", space] if space else []
        peer = ["peer", "name", interface, *end]
        self._ip("link", "add", port, "netns", self._switch, "type", "veth", *peer)
        self._ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")

    def _address(self, number: int, interface: str, *where: str) -> None:
        self._ip(*where, "address", "add", f"{IPV4}.{number}/24", "dev", interface)
        self._ip(*where, "address", "add", f"{IPV6}:{number}/64", "dev", interface, "nodad")
        self._ip(*where, "link", "set", interface, "up")

    def _ip(self, *words: str) -> None:
        done = subprocess.run(
            [str(path_of("ip")), *words], capture_output=True, text=True, timeout=20
        )
        assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"

    def namespace(self, host: str) -> str:
        return f"{self._tag}-{host}"

    def ipv4(self, host: str) -> str:
        return f"{IPV4}.{self._numbers[host]}"

    def ipv6(self, host: str) -> str:
        return f"{IPV6}:{self._numbers[host]}"

    def set_names(self, names: Mapping[str, list[str]]) -> None:
        """Names of addresses, beside those of the hosts, for processes that look them up from now on."""
        known = {host: [self.ipv4(host)] for host in self._numbers} | dict(names)
        lines = [f"{one} {name}" for name, addresses in known.items() for one in addresses]
        text = "127.0.0.1 localhost\n::1 localhost\n" + "\n".join(lines) + "\n"
        for host in self._numbers:
            # In place: a running process has the file itself as its /etc/hosts.
            Path(f"/etc/netns/{self.namespace(host)}/hosts").write_text(text)

    def start(self, host: str, *words: str, **variables: str) -> subprocess.Popen[bytes]:
        """Starts a program on a host; its output goes to `log(host)`."""
        own = {
            # By default gloo takes the interface of the machine's name, which has no address here.
            "GLOO_SOCKET_IFNAME": INTERFACE, "VLLM_HOST_IP": self.ipv4(host), **variables,
        }  # fmt: skip
        with self._log(host).open("ab") as output:
            process = subprocess.Popen(
                [str(path_of("ip")), "netns", "exec", self.namespace(host), *words],
                env=environment(**own), cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self._started.append(process)
        return process

    def log(self, host: str) -> str:
        return self._log(host).read_text(errors="replace") if self._log(host).exists() else ""

    def _log(self, host: str) -> Path:
        return self._folder / f"{host}.log"

    def logs(self) -> str:
        return "\n".join(f"== {host}\n{self.log(host)[-3000:]}" for host in self._numbers)

    def unplug(self, host: str) -> None:
        """Loses every packet from and to a host."""
        self._ip("-n", self._switch, "link", "set", f"port{self._numbers[host]}", "down")

    def plug(self, host: str) -> None:
        """Ends `unplug`."""
        self._ip("-n", self._switch, "link", "set", f"port{self._numbers[host]}", "up")

    def cut(self, host: str, other: str) -> None:
        """Loses every packet from a host to another one, as behind a firewall that drops them."""
        # A card that nobody has.
        card = ["lladdr", "02:00:00:00:00:99", "dev", INTERFACE, "nud", "permanent"]
        for address in (self.ipv4(other), self.ipv6(other)):
            self._ip("-n", self.namespace(host), "neighbour", "replace", address, *card)

    def close(self) -> None:
        """Ends all programs, and removes the network."""
        for process in self._started:
            process.terminate()
        for process in self._started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        spaces = [self._switch, *map(self.namespace, self._numbers)]
        for space in spaces:
            subprocess.run([str(path_of("ip")), "netns", "delete", space], capture_output=True)
            shutil.rmtree(f"/etc/netns/{space}", ignore_errors=True)
