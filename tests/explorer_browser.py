"""A page of the explorer in Chromium, and everything it did."""

from __future__ import annotations

import time
from urllib.parse import urlsplit

from chromium import Chromium


class Page(Chromium):
    """Chromium with one page of the explorer."""

    def open(
        self, address: str, token: str, width: int = 1200, height: int = 1000, scheme: str = "light", scale: float = 1
    ) -> None:
        """Load the explorer afresh."""
        self.begin(width, height, scheme, scale)
        self.driver.get("about:blank")
        self.driver.get(f"{address}/?token={token}")
        self.wait_until_ready()
        self.settle()

    def settle(self) -> None:
        """Wait until the page has its answers; a search waits a moment before it asks."""
        time.sleep(0.32)
        self.wait("return !Number(document.body.dataset.asking)")

    def click(self, css: str) -> None:
        """Click as a person would, and wait for what comes of it."""
        super().click(css)
        self.settle()

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

    def check_quiet(self, address: str) -> None:
        """Nothing ran that should not, nothing left the machine, nothing was complained about."""
        self.check_nothing_ran()
        ours = urlsplit(address).netloc
        assert [u for u in self.requests if urlsplit(u).netloc != ours and not u.startswith("about:")] == []
        assert self.requests
