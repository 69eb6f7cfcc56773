"""Debian's Chromium without a screen, driven by selenium; nothing is downloaded."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from harness.servers import wait_until
from tests.all.system.packages import path_of

WITHIN_S = 20
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-extensions", "--disable-default-apps", "--hide-scrollbars", "--no-proxy-server",
)  # fmt: skip


class Browser:
    """A tab, and what tests ask it."""

    def __init__(self, driver: webdriver.Chrome):
        self.driver = driver

    def open(self, url: str) -> None:
        self.driver.get(url)

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def find_all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return str(
            self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)
        )

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def wait_for(self, condition: Callable[[], object]) -> None:
        wait_until(condition, WITHIN_S, lambda: self.text("body")[:2000] + json.dumps(self.log()))

    def press(self, *keys: str) -> None:
        """Presses keys wherever the focus is."""
        for key in keys:
            self.driver.switch_to.active_element.send_keys(key)

    def focused(self) -> str:
        """The id of the focused element, else its class, else its tag."""
        script = "const e = document.activeElement; return e.id || e.className || e.tagName"
        return str(self.run(script))

    def log(self) -> list[dict[str, Any]]:
        """Console messages and errors since the last call, also those of the content policy."""
        return list(self.driver.get_log("browser"))

    def set_view(self, *, width: int, height: int, scale: float = 1, dark: bool = False) -> None:
        """The size of the page in CSS pixels, and the colours that the user prefers."""
        metrics = {
            "width": width,
            "height": height,
            "deviceScaleFactor": scale,
            "mobile": width < 600,
        }
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser with a profile of its own. Needs `chromium` and `chromedriver`."""
    options = webdriver.ChromeOptions()
    options.binary_location = path_of("chromium") or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    profile = tempfile.mkdtemp(prefix="titopool-browser-")
    for argument in (*OPTIONS, f"--user-data-dir={profile}"):
        options.add_argument(argument)
    # With the driver's path selenium asks no host for one.
    service = webdriver.ChromeService(executable_path=path_of("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    try:
        driver.set_page_load_timeout(60)
        driver.set_script_timeout(60)
        yield Browser(driver)
    finally:
        driver.quit()
        shutil.rmtree(profile, ignore_errors=True)
