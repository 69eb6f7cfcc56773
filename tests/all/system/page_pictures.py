"""Takes docs/page-*.png: the page before a server under load, light, dark and on a phone.

    python -m tests.all.system.page_pictures [--seconds 300] [--out docs]

Real vLLM on the tiny demo model: two workers, clients of which some send what is refused, a weight
update every 20 s, and a worker that is killed on the way. The text is set in Inter if the machine
has it (Debian's fonts-inter).
"""

import argparse
import base64
import io
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from PIL import Image
from selenium.webdriver.common.keys import Keys

from harness.servers import REPOSITORY, Server, running_server, wait_until
from tests.all.system.browser import Browser, browser
from tests.all.system.page_server import load, update_weights
from titopool.demo_model import make_model

VIEWS: dict[str, dict[str, Any]] = {
    "light": {"width": 1280, "height": 900},
    "dark": {"width": 1280, "height": 900, "dark": True},
    "phone": {"width": 390, "height": 844},
}
UPDATE_EVERY_S = 20.0
MAX_BYTES = 300_000
ENGINE = ("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=300, help="of load before the pictures")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = [folder / f"tiny-qwen3-{seed}" for seed in range(2)]
        for seed, model in enumerate(models):
            model.mkdir()
            make_model(model, seed=seed)
        arguments = (
            str(models[0]), "--num-workers", "2", "--num-front-ends", "2",
            "--weights-root", str(folder), *ENGINE,
        )  # fmt: skip
        with (
            running_server(*arguments, log=folder / "log", num_workers=2) as server,
            load(server, num_clients=12, share_bad=0.06),
        ):
            work(server, models, options.seconds)
            with browser() as started:
                for view, size in VIEWS.items():
                    path = options.out / f"page-{view}.png"
                    path.write_bytes(picture(started, server, size))
                    print(f"{path}: {path.stat().st_size:,} bytes")


def work(server: Server, models: list[Path], seconds: float) -> None:
    """Weight updates for so long, and the end of a worker after half the time."""
    began, version, has_killed = time.monotonic(), 0, False
    while time.monotonic() - began < seconds:
        time.sleep(UPDATE_EVERY_S)
        version += 1
        update_weights(server, models[version % 2], version)
        if not has_killed and time.monotonic() - began > seconds / 2:
            has_killed = True
            worker_process(server, "1").kill()
            wait_until(lambda: server.get("/ready").json()["num_ready"] == 1, 30)
            server.wait_until_ready(2)


def worker_process(server: Server, name: str) -> psutil.Process:
    for process in psutil.Process(server.process.pid).children(recursive=True):
        words = process.cmdline()
        if "--worker-id" in words and words[words.index("--worker-id") + 1] == name:
            return process
    raise LookupError(f"no process of worker {name}")


def picture(page: Browser, server: Server, size: dict[str, Any]) -> bytes:
    """The whole page after a prompt, as PNG."""
    page.set_view(**size)
    page.open(server.url + "/")
    page.wait_for(lambda: page.text("#live") == "Live")
    page.find("#max-tokens").send_keys(Keys.CONTROL, "a", Keys.NULL, "24")
    page.find("#seed").send_keys("3")
    page.find("#prompt").send_keys(Keys.CONTROL, "a", Keys.NULL, "What is 6 times 7?")
    page.find("#generate").click()
    page.wait_for(lambda: page.find_all("#tokens [role=option]"))
    page.run("document.querySelectorAll('#tokens li')[5].click()")
    # The focus belongs to nobody in a picture; and the charts have their size.
    page.run("document.activeElement.blur(); scrollTo(0, 0)")
    height = page.run("return document.documentElement.scrollHeight")
    page.set_view(**{**size, "height": height})
    time.sleep(3)
    shot = Image.open(io.BytesIO(base64.b64decode(page.driver.get_screenshot_as_base64())))
    packed = io.BytesIO()
    shot.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(packed, "PNG", optimize=True)
    if len(packed.getvalue()) > MAX_BYTES:
        raise SystemExit(f"expected at most {MAX_BYTES} bytes, got {len(packed.getvalue())}")
    return packed.getvalue()


if __name__ == "__main__":
    main()
