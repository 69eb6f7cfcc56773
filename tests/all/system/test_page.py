"""The page in a real browser, before stub workers and two front ends, and before vLLM."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from app.operators.page.samples import NUM_LEARNING
from harness.servers import Server, running_server
from tests.all.system.packages import need
from tests.all.system.page_server import StubWorkers, load, update_weights

KEY = "a-secret-key"
DESKTOP, PHONE, SMALL_PHONE = (1280, 900), (390, 844), (320, 640)
# A stub has no tokenizer, and the browser logs each answer that is an error. Tests read canvases.
# The last one: a server ends while the page is open.
EXPECTED_NOISE = (
    "/detokenize - Failed to load resource",
    "willReadFrequently",
    "ERR_CONNECTION_REFUSED",
)


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubWorkers]:
    need("chromium", "chromedriver")
    found = StubWorkers(tmp_path_factory.mktemp("stubs"), "--slow", "apply=0.1")
    yield found
    found.stop()


@pytest.fixture(scope="module")
def server(workers: StubWorkers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two front ends without a key."""
    log = tmp_path_factory.mktemp("server") / "log"
    with workers.server(log, "--num-front-ends", "2") as running:
        yield running


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    need("chromium", "chromedriver")
    from tests.all.system.browser import browser

    with browser() as started:
        yield started


@pytest.fixture
def tab(driver) -> Iterator[Any]:
    """The browser with a desktop's view; fails the test if the page logged an error."""
    driver.set_view(width=DESKTOP[0], height=DESKTOP[1])
    driver.log()
    yield driver
    noise = [one for one in driver.log() if not is_expected(one["message"])]
    driver.open("about:blank")
    assert noise == []


@pytest.fixture
def page(tab, server: Server) -> Any:
    """The page, once it shows the workers."""
    tab.open(server.url + "/")
    tab.wait_for(lambda: tab.text("#live") == "Live")
    return tab


def is_expected(message: str) -> bool:
    return any(one in message for one in EXPECTED_NOISE)


def ask_for_ids(page: Any, text: str) -> None:
    """Sends a prompt of ids with the keyboard."""
    page.run("document.querySelector('[name=kind]:checked').focus()")
    page.press(Keys.ARROW_RIGHT if page.find("[value=text]").is_selected() else "")
    assert page.find("[value=ids]").is_selected()
    page.press(Keys.TAB)
    assert page.focused() == "prompt"
    page.press(
        Keys.CONTROL + "a" + Keys.NULL, Keys.DELETE, text, Keys.CONTROL + Keys.ENTER + Keys.NULL
    )


def numbers_of(page: Any, selector: str) -> list[int]:
    return [int(one) for one in page.run(
        "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)", selector
    )]  # fmt: skip


# ---- what is shown -------------------------------------------------------------------


def test_it_opens_without_errors_and_shows_the_workers(page):
    assert page.driver.title == "stub · titopool"
    rows = page.find_all("#workers tbody tr")
    assert len(rows) == 2
    for index, row in enumerate(rows):
        assert row.find_element(By.CSS_SELECTOR, "th").text.startswith(str(index))
        assert row.find_element(By.CSS_SELECTOR, ".phase").text == "ready"
        for word in ("stub", "vLLM", "/ 256", "none seen"):
            assert word in row.text
    assert page.text("#sum-workers").startswith("2")
    # Each chart says what it shows, in words too.
    labels = [one.get_attribute("aria-label") for one in page.find_all(".chart")]
    assert [label.partition(",")[0] for label in labels] == [
        "Tokens", "Requests", "Time to first token", "Weight updates", "Errors", "Prefix cache",
    ]  # fmt: skip


def test_charts_have_points_under_load(page, server: Server, workers: StubWorkers):
    with load(server, num_clients=4):
        # A front end that has just started takes an update for one of before.
        page.wait_for(lambda: num_samples(server) > 2 * NUM_LEARNING)
        update_weights(server, workers.root / "step", 1)
        page.wait_for(lambda: colored_pixels(page, 0, "--series-1") > 50)
        page.wait_for(lambda: colored_pixels(page, 3, "--series-1") > 20)
        page.wait_for(lambda: re.search(r"generated ([1-9][\d,.]*)", chart_words(page, 0)))
        page.wait_for(lambda: "1" in page.text("#workers tbody td.number"))
        # With the keyboard, a chart reads out the values at a time.
        page.find_all(".chart")[0].send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
        said = page.run("return document.querySelector('#cursor').textContent")
        assert re.match(r"\d\d:\d\d:\d\d: Tokens, a second: generated [\d.,–]+", said), said
    # A page that is opened afterwards has the minutes before.
    page.open(server.url + "/")
    page.wait_for(lambda: colored_pixels(page, 0, "--series-1") > 50)


def num_samples(server: Server) -> int:
    return len(server.get("/metrics/history").json()["time_s"])


def chart_words(page: Any, index: int) -> str:
    return str(page.find_all(".chart")[index].get_attribute("aria-label"))


def colored_pixels(page: Any, chart: int, color: str) -> int:
    """How many pixels of a chart have the colour of a series."""
    return int(page.run(
        """
        const wanted = getComputedStyle(document.documentElement).getPropertyValue(arguments[1]).trim();
        const rgb = [1, 3, 5].map((at) => parseInt(wanted.slice(at, at + 2), 16));
        const canvas = document.querySelectorAll(".chart")[arguments[0]].querySelector("canvas");
        if (!canvas?.width || canvas.closest(".empty")) return 0;
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        let found = 0;
        for (let at = 0; at < data.length; at += 4) {
          if (data[at + 3] > 200 && rgb.every((one, index) => Math.abs(data[at + index] - one) < 8)) found++;
        }
        return found;
        """, chart, color,
    ))  # fmt: skip


def test_a_worker_s_end_is_shown(page, server: Server, workers: StubWorkers):
    workers.restart(1)
    page.wait_for(lambda: "its connection is closed" in page.text("[data-worker='1'] .end"))
    page.wait_for(lambda: page.text("[data-worker='1'] .phase") == "ready")


def test_a_server_that_does_not_answer_is_named_and_comes_back(page):
    network = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    page.driver.execute_cdp_cmd("Network.enable", {})
    page.driver.execute_cdp_cmd("Network.emulateNetworkConditions", {**network, "offline": True})
    page.wait_for(lambda: re.match(r"Server unreachable since \d\d:\d\d:\d\d", page.text("#live")))
    assert len(page.find_all("#workers tbody tr")) == 2
    page.driver.execute_cdp_cmd("Network.emulateNetworkConditions", {**network, "offline": False})
    page.wait_for(lambda: page.text("#live") == "Live")
    # The browser logs what it could not load.
    assert all("ERR_INTERNET_DISCONNECTED" in one["message"] for one in page.log())


# ---- the prompt ----------------------------------------------------------------------


def test_a_prompt_of_ids(page):
    ask_for_ids(page, "[11, 12, 13]")
    page.wait_for(lambda: page.find_all("#tokens [role=option]"))
    assert numbers_of(page, "#tokens i") == [13, 12, 11]
    assert "log-probability −1.500" in page.find("#tokens li").get_attribute("aria-label")
    assert "mean log-probability −1.500" in page.text(".facts")
    assert "Ids only, without text" in page.text("#verdict")
    page.find("#tokens li").click()
    page.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert page.text("#token-detail").startswith("Token 2: id 11, log-probability −1.500")
    page.press(Keys.HOME)
    assert page.text("#token-detail").startswith("Token 0: id 13")


@pytest.mark.parametrize("text, expected", [
    ("{", "this is no JSON"), ("7", "this is no list"), ("[]", "this one is empty"),
    ("[1, -2]", "got -2 at place 1"), ("[1, 2.5]", "got 2.5 at place 1"),
])  # fmt: skip
def test_a_list_that_is_none_is_not_sent(page, text: str, expected: str):
    ask_for_ids(page, text)
    assert expected in page.text("#prompt-error")
    assert page.find("#prompt").get_attribute("aria-invalid") == "true"
    assert page.focused() == "prompt"


def test_an_error_of_the_server_is_shown_with_its_request(page):
    ask_for_ids(page, "[999999]")
    page.wait_for(lambda: page.text("#prompt-error"))
    assert re.search(r"prompts\[0\]\[0\].*\(request [0-9a-f]{32}\)", page.text("#prompt-error"))
    assert all("400" in one["message"] for one in page.log())


def test_the_tokens_of_a_text_beside_tokenizing_again(tab, tmp_path: Path):
    options = ("--dtype", "float32", "--max-model-len", "512", "--num-front-ends", "1")
    with running_server(*options, log=tmp_path / "log") as vllm:
        tab.open(vllm.url + "/")
        tab.wait_for(lambda: tab.text("#live") == "Live")
        tab.find("#seed").send_keys("7")
        tab.find("#generate").click()
        tab.wait_for(lambda: tab.find_all("#tokens [role=option]"))
        ids = numbers_of(tab, "#tokens i")
        assert (
            ids
            == vllm.generate(["Hello, world"], max_tokens=32, generation_kwargs={"seed": 7})[
                "completion_ids"
            ][0]
        )
        text = vllm.post("/detokenize", {"tokens": ids}).json()["prompt"]
        again = vllm.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()[
            "tokens"
        ]
        # Random weights never write a text as the tokenizer would.
        assert again != ids
        assert f"their text gives {len(again)} tokens" in tab.text("#verdict")
        rows = tab.run(
            "return [...document.querySelectorAll('.runs tbody tr')].map((row) => "
            "[row.className, ...[...row.cells].map((cell) => cell.textContent)])"
        )
        assert [int(one) for row in rows for one in row[2].split()] == ids
        assert [int(one) for row in rows for one in row[4].split()] == again
        assert {(row[0], row[3]) for row in rows} <= {("same", "="), ("differs", "≠")}
        assert all((row[2] == row[4]) == (row[0] == "same") for row in rows)
        # Colours tell probabilities apart.
        assert len({one.get_attribute("class") for one in tab.find_all("#tokens li")}) > 1
        check_contrast(tab)


# ---- keys ----------------------------------------------------------------------------


def test_a_server_with_a_key_is_asked_for_it(tab, workers: StubWorkers, tmp_path: Path):
    with workers.server(tmp_path / "log", TITOPOOL_API_KEY=KEY) as keyed:
        tab.open(keyed.url + "/")
        tab.wait_for(lambda: tab.find("#key-dialog").is_displayed())
        assert tab.focused() == "key"
        assert tab.find_all("[data-worker]") == []
        tab.press("wrong", Keys.ENTER)
        tab.wait_for(lambda: "does not know this key" in tab.text("#key-error"))
        tab.press("wrong again", Keys.ENTER)
        assert "without blanks" in tab.text("#key-error")
        tab.press(Keys.CONTROL + "a" + Keys.NULL, KEY, Keys.ENTER)
        tab.wait_for(lambda: len(tab.find_all("[data-worker]")) == 2)
        assert not tab.find("#key-dialog").is_displayed()
        # For this tab only, and nowhere on the page.
        assert tab.run("return Object.values(sessionStorage)") == [KEY]
        assert tab.run("return localStorage.length") == 0
        assert KEY not in tab.driver.current_url + tab.driver.page_source
        assert tab.driver.get_cookies() == []
        tab.open(keyed.url + "/")
        tab.wait_for(lambda: tab.text("#live") == "Live")
        ask_for_ids(tab, "[5, 6]")
        tab.wait_for(lambda: numbers_of(tab, "#tokens i") == [6, 5])
        assert KEY not in keyed.log
        messages = [one["message"] for one in tab.log() if not is_expected(one["message"])]
        assert all("401" in one for one in messages), messages


# ---- keyboard, phone, colours --------------------------------------------------------


def test_the_keyboard_reaches_everything_in_order(page):
    page.run("document.body.focus()")
    reached = []
    for _ in range(20):
        page.press(Keys.TAB)
        reached.append(page.focused())
        visible = page.run(
            "const one = document.activeElement; const shown = one.type === 'radio' ?"
            " one.nextElementSibling : one;"
            "return getComputedStyle(shown).outlineStyle !== 'none'"
        )
        assert visible, f"no focus is seen on {reached[-1]}"
        if reached[-1] == "generate":
            break
    assert reached[0] == "skip"
    charts = [one for one in reached if "chart" in one]
    assert len(charts) == 6
    rest = [one for one in reached if one not in charts]
    assert rest[1:] == [
        "card scroll",
        "INPUT",
        "prompt",
        "max-tokens",
        "temperature",
        "seed",
        "generate",
    ]
    page.run("document.querySelector('.skip').focus()")
    page.press(Keys.ENTER)
    assert page.focused() == "try"
    unnamed = page.run(
        "return [...document.querySelectorAll('input, textarea, button, [tabindex=\"0\"]')]"
        ".filter((one) => !(one.labels?.length || one.textContent.trim()"
        " || one.getAttribute('aria-label') || one.getAttribute('aria-labelledby')))"
        ".map((one) => one.outerHTML)"
    )
    assert unnamed == []


@pytest.mark.parametrize("size", [PHONE, SMALL_PHONE], ids=["390", "320"])
def test_a_phone_scrolls_down_only(page, size: tuple[int, int]):
    page.set_view(width=size[0], height=size[1])
    ask_for_ids(page, json.dumps(list(range(40_100, 40_160))))
    page.wait_for(lambda: page.find_all("#tokens [role=option]"))
    # The reason has an address in it, which is wider than a phone.
    page.wait_for(lambda: "Ids only, without text" in page.text("#verdict"))
    # Charts follow the new width a frame later.
    page.wait_for(lambda: page.run("return document.documentElement.scrollWidth") <= size[0])
    # Nothing sticks out that a finger would have to find.
    wide = page.run(
        "return [...document.querySelectorAll('main *')].filter((one) =>"
        " one.getBoundingClientRect().right > innerWidth + 1 && one.checkVisibility()"
        " && !one.closest('.visually-hidden, thead, .runs-box')).map((one) => one.outerHTML.slice(0, 200))"
    )
    assert wide == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_stands_out_from_its_ground(page, dark: bool):
    page.set_view(width=DESKTOP[0], height=DESKTOP[1], dark=dark)
    ground = page.run("return getComputedStyle(document.documentElement).backgroundColor")
    assert (max(map(int, re.findall(r"\d+", ground)[:3])) < 60) == dark
    ask_for_ids(page, "[999999]")
    page.wait_for(lambda: page.text("#prompt-error"))
    check_contrast(page)
    ask_for_ids(page, "[11, 12]")
    page.wait_for(lambda: page.find_all("#tokens [role=option]"))
    check_contrast(page)
    # The error above is a 400 of the server, which the browser logs.
    assert all("400" in one["message"] for one in page.log() if not is_expected(one["message"]))


def check_contrast(page: Any) -> None:
    """All visible text has WCAG's contrast for small text (AA), 4.5."""
    poor = page.run(
        """
        const parts = (color) => color.match(/[\\d.]+/g).map(Number);
        const channel = (value) => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
        const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
        const ground = (one) => {
          for (; one; one = one.parentElement) {
            const color = parts(getComputedStyle(one).backgroundColor);
            if (color.length < 4 || color[3] > 0.99) return color;
          }
          return [255, 255, 255];
        };
        const poor = [];
        const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
        while (texts.nextNode()) {
          const one = texts.currentNode.parentElement;
          if (!texts.currentNode.data.trim() || !one.checkVisibility() || one.closest("button:disabled, noscript")) continue;
          const [high, low] = [luminance(parts(getComputedStyle(one).color)), luminance(ground(one))].sort((a, b) => b - a);
          const ratio = (high + 0.05) / (low + 0.05);
          if (ratio < 4.5) poor.push(`${one.className || one.tagName} “${texts.currentNode.data.slice(0, 30)}” ${ratio.toFixed(2)}`);
        }
        return poor;
        """
    )
    assert poor == []


def test_the_page_of_the_api_shows_and_calls_every_route(tab: Any, server: Server):
    document = server.get("/openapi.json").json()
    tab.open(server.url + "/docs/")
    num_operations = sum(len(one) for one in document["paths"].values())
    tab.wait_for(lambda: len(tab.find_all(".opblock")) == num_operations)
    assert tab.find_all(".errors-wrapper") == []
    # Swagger UI names an operation's element by its tag and id.
    live = f"[id$='-{document['paths']['/live']['get']['operationId']}']"
    tab.find(f"{live} .opblock-summary-control").click()
    tab.wait_for(lambda: tab.find_all(f"{live} .try-out__btn"))
    tab.find(f"{live} .try-out__btn").click()
    tab.find(f"{live} .execute").click()
    tab.wait_for(lambda: tab.text(f"{live} .live-responses-table .response-col_status") != "")
    assert tab.text(f"{live} .live-responses-table .response .response-col_status").startswith(
        "200"
    )
    # Nothing came from another host.
    urls = tab.run("return performance.getEntriesByType('resource').map(one => one.name)")
    assert urls
    assert all(one.startswith((server.url, "data:")) for one in urls)
