"""A page in Chromium, and everything it did: what the browser tests of report and explorer share."""

from __future__ import annotations

import base64
import json
import shutil
import time
from pathlib import Path

import pytest

CHROMIUM, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
AXE = Path(__file__).parent / "browser" / "node_modules" / "axe-core" / "axe.min.js"
#: Marks of a module of browser tests, and of a test that needs axe-core.
BROWSER_TESTS = [
    pytest.mark.browser,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no browser: apt-get install chromium chromium-driver"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
needs_axe = pytest.mark.skipif(not AXE.is_file(), reason="no axe-core: npm install --prefix tests/browser, or make test-browser")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars", "--force-color-profile=srgb")
#: Runs before any script of a page: whatever gets through is counted.
CANARY = """
window.__calls = [];
const noted = (name) => (x) => { window.__calls.push([name, String(x)]); };
for (const name of NAMES) window[name] = noted(name);
window.__errors = [];
addEventListener("error", (e) => window.__errors.push(String(e.message)));
addEventListener("unhandledrejection", (e) => window.__errors.push(String(e.reason)));
document.addEventListener("securitypolicyviolation", (e) => window.__errors.push(`${e.violatedDirective} ${e.blockedURI}`));
"""
RUN_AXE = """
const done = arguments[0];
const told = (v) => [v.impact, v.id, v.nodes.slice(0, 3).map((n) => n.html.slice(0, 200))];
axe.run(document, {resultTypes: ["violations"]}).then((r) => done(r.violations.map(told)));
"""


class Chromium:
    """Chromium with one page.

    Attributes:
        console: What the page complained about.
        requests: The addresses it asked for.
        blocked: Why requests of it failed.
    """

    #: Functions that the page itself has no use for, beside those that open windows.
    unused: tuple[str, ...] = ()
    #: Seconds that a page may take to get somewhere.
    patience = 40.0

    def __init__(self, downloads: Path | None = None) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.options import Options
        from selenium.webdriver.chrome.service import Service

        options = Options()
        options.binary_location = CHROMIUM
        for flag in FLAGS:
            options.add_argument(flag)
        if downloads is not None:
            options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(DRIVER))
        names = json.dumps(["alert", "confirm", "prompt", "open", *self.unused])
        canary = CANARY.replace("NAMES", names)
        self.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": canary})
        self.console: list[str] = []
        self.requests: list[str] = []
        self.blocked: list[str] = []

    def begin(self, width: int, height: int, scheme: str, scale: float) -> None:
        """Forget what was seen, and take the shape of a screen."""
        self.look()
        self.console.clear()
        self.requests.clear()
        self.blocked.clear()
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}, {"name": "prefers-reduced-motion", "value": "reduce"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def wait_until_ready(self) -> None:
        self.wait("return document.documentElement.dataset.ready === 'yes'")

    def run(self, script: str, *values):
        return self.driver.execute_script(script, *values)

    def wait(self, script: str, seconds: float | None = None) -> None:
        until = time.monotonic() + (self.patience if seconds is None else seconds)
        while not self.run(script):
            assert time.monotonic() < until, f"never: {script}"
            time.sleep(0.05)

    def find(self, css: str):
        return self.driver.find_element("css selector", css)

    def all(self, css: str):
        return self.driver.find_elements("css selector", css)

    def click(self, css: str) -> None:
        """Click as a person would."""
        element = self.find(css)
        self.run("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()

    def choose(self, switch: str, value: str) -> None:
        """Click a switch as a person would."""
        self.click(f"#{switch} input[value='{value}']")
        assert self.find(f"#{switch} input[value='{value}']").is_selected()

    def look(self) -> None:
        """Gather console messages and requests so far."""
        self.console += [f"{e['level']} {e['message']}" for e in self.driver.get_log("browser")]
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
            elif message["method"] == "Network.loadingFailed":
                self.blocked.append(message["params"].get("blockedReason", "?"))

    def check_nothing_ran(self) -> None:
        """Nothing ran that should not, and nothing was complained about."""
        self.look()
        assert self.run("return window.__pwned") is None
        assert self.run("return window.__calls") == []
        assert self.run("return window.__errors") == []
        assert self.console == []

    def axe_violations(self) -> list:
        """Return what axe-core finds; its script must be on the page."""
        return self.driver.execute_async_script(RUN_AXE)

    def check_theme(self, scheme: str) -> None:
        """On a page that was opened under a scheme of the system: the switch changes it, is remembered, and goes back."""
        background = "return getComputedStyle(document.body).backgroundColor"
        own = self.run(background)
        self.choose("theme", "dark" if scheme == "light" else "light")
        other = self.run(background)
        assert own != other
        self.driver.refresh()
        self.wait_until_ready()
        assert self.run(background) == other  # remembered
        self.choose("theme", "auto")
        assert self.run(background) == own

    def picture(self, path: Path, clip: dict | None = None) -> None:
        more = {"clip": {**clip, "scale": 1}, "captureBeyondViewport": True} if clip else {}
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", **more})
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(shot["data"]))
