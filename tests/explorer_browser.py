"""A page of the explorer in Chromium, and everything it did."""

from __future__ import annotations

import base64
import json
import shutil
import time
from pathlib import Path
from urllib.parse import urlsplit

CHROMIUM, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
#: Runs before any script of a page: whatever gets through is counted.
CANARY = """
window.__calls = [];
const noted = (name) => (x) => { window.__calls.push([name, String(x)]); };
for (const name of ["alert", "confirm", "prompt", "open"]) window[name] = noted(name);
window.__errors = [];
addEventListener("error", (e) => window.__errors.push(String(e.message)));
addEventListener("unhandledrejection", (e) => window.__errors.push(String(e.reason)));
document.addEventListener("securitypolicyviolation", (e) => window.__errors.push(`${e.violatedDirective} ${e.blockedURI}`));
"""


class Page:
    """Chromium with one page of the explorer."""

    def __init__(self, downloads: Path) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.options import Options
        from selenium.webdriver.chrome.service import Service

        options = Options()
        options.binary_location = CHROMIUM
        flags = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars", "--force-color-profile=srgb")
        for flag in flags:
            options.add_argument(flag)
        options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(DRIVER))
        self.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": CANARY})
        self.console: list[str] = []
        self.requests: list[str] = []

    def open(
        self, address: str, token: str, width: int = 1200, height: int = 1000, scheme: str = "light", scale: float = 1
    ) -> None:
        """Load the explorer afresh."""
        self.look()
        self.console.clear()
        self.requests.clear()
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}, {"name": "prefers-reduced-motion", "value": "reduce"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        self.driver.get("about:blank")
        self.driver.get(f"{address}/?token={token}")
        self.wait("return document.documentElement.dataset.ready === 'yes'")
        self.settle()

    def run(self, script: str, *values):
        return self.driver.execute_script(script, *values)

    def wait(self, script: str, seconds: float = 40.0) -> None:
        until = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < until, f"never: {script}"
            time.sleep(0.05)

    def settle(self) -> None:
        """Wait until the page has its answers; a search waits a moment before it asks."""
        time.sleep(0.32)
        self.wait("return !Number(document.body.dataset.asking)")

    def find(self, css: str):
        return self.driver.find_element("css selector", css)

    def all(self, css: str):
        return self.driver.find_elements("css selector", css)

    def click(self, css: str) -> None:
        """Click as a person would, and wait for what comes of it."""
        element = self.find(css)
        self.run("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()
        self.settle()

    def choose(self, switch: str, value: str) -> None:
        self.click(f"#{switch} input[value='{value}']")

    def pick(self, select: str, text: str | int) -> None:
        """Choose an entry of a list by its text or its place."""
        from selenium.webdriver.support.select import Select

        found = Select(self.find(f"#{select}"))
        if isinstance(text, int):
            found.select_by_index(text)
        else:
            found.select_by_visible_text(text)
        self.settle()

    def write(self, field: str, text: str) -> None:
        """Put a text into a field, and say so: keys cannot type every character."""
        element = self.find(f"#{field}")
        self.run(
            "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input', {bubbles: true}))", element, text
        )
        self.settle()

    def look(self) -> None:
        """Gather console messages and requests so far."""
        self.console += [f"{e['level']} {e['message']}" for e in self.driver.get_log("browser")]
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])

    def check_quiet(self, address: str) -> None:
        """Nothing ran that should not, nothing left the machine, nothing was complained about."""
        self.look()
        assert self.run("return window.__pwned") is None
        assert self.run("return window.__calls") == []
        assert self.run("return window.__errors") == []
        assert self.console == []
        ours = urlsplit(address).netloc
        assert [u for u in self.requests if urlsplit(u).netloc != ours and not u.startswith("about:")] == []
        assert self.requests

    def picture(self, path: Path) -> None:
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(shot["data"]))
