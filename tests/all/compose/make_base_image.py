"""Makes a base image for the Dockerfile on a machine that cannot pull one.

    python -m tests.all.compose.make_base_image TAG

The image is a Debian of this machine's release, from this machine's package mirror. A folder in the
image holds the Python packages of the CPU build, so that the image build needs neither network nor
this machine's pip settings. Needs root, debootstrap, and Debian's Python in the same version as
this one.
"""

import platform
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent.parent
# Path inside the image.
WHEELS = "opt/wheels"
PACKAGES = "ca-certificates,g++,libnuma1,make,python3,python3-venv"
TIMEOUT_S = 900.0


def run(*command: str, **options: object) -> str:
    """Runs `command` and returns its output; an error contains the output."""
    done = subprocess.run(
        command, cwd=REPOSITORY, timeout=TIMEOUT_S, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with {done.returncode}: {done.stdout[-4000:]}"
        )
    return str(done.stdout)


def package_mirror() -> tuple[str, str]:
    """This machine's Debian release and the mirror that apt uses."""
    release = platform.freedesktop_os_release()["VERSION_CODENAME"]
    format = "$(CODENAME) $(COMPONENT) $(REPO_URI)"
    for line in run("apt-get", "indextargets", "--format", format, "Identifier: Packages").split(
        "\n"
    ):
        if line.startswith(f"{release} main "):
            return release, line.split()[2]
    raise RuntimeError(f"apt has no source of {release} main")


def make_base_image(tag: str) -> None:
    """Makes the image `tag`.

    Raises:
        RuntimeError: a command failed; the message contains its output.
    """
    release, mirror = package_mirror()
    with (
        tempfile.TemporaryDirectory(prefix="titopool-base-") as folder,
        ThreadPoolExecutor() as threads,
    ):
        root, wheels = Path(folder) / "root", Path(folder) / "wheels"
        downloaded = threads.submit(
            run, sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(wheels),
            "-c", "constraints/cpu.txt", ".[cpu]", "torch", "setuptools>=77", "wheel",
        )  # fmt: skip
        run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", release, str(root), mirror)
        version = run("chroot", str(root), "python3", "--version").split()[1]
        if version.split(".")[:2] != platform.python_version().split(".")[:2]:
            raise RuntimeError(f"the image has Python {version}, packages are for another one")
        downloaded.result()
        wheels.rename(root / WHEELS)
        (root / "etc/pip.conf").write_text(f"[global]\nno-index = true\nfind-links = /{WHEELS}\n")
        for archive in (root / "var/cache/apt/archives").glob("*.deb"):
            archive.unlink()
        with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as tar:
            run("docker", "import", "-", tag, stdin=tar.stdout)
    if tar.returncode:
        raise RuntimeError(f"tar ended with {tar.returncode}")


if __name__ == "__main__":
    make_base_image(sys.argv[1])
