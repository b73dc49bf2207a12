"""The Prefect UI in a real browser: the old one (V1) and the new one (V2)."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

from playwright.sync_api import Page, sync_playwright

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # Nothing but the server on loopback is ever asked: V2 would call an analytics host.
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)
PATIENCE = 60_000


@contextmanager
def page(width: int = 1400, height: int = 1000) -> Iterator[Page]:
    """A page of a headless Chromium; that there is none is a failure, never a skip."""
    assert CHROMIUM.exists(), f"{CHROMIUM} is missing: .ci/setup installs it (apt: chromium)"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, headless=True, args=FLAGS, timeout=PATIENCE
        )
        opened = browser.new_page(viewport={"width": width, "height": height})
        opened.set_default_timeout(PATIENCE)
        yield opened
        browser.close()


class OldUi:
    """V1, at the plain paths."""

    def __init__(self, page: Page, ui: str) -> None:
        self.page = page
        self.ui = ui

    def open_run(self, run: UUID) -> None:
        self.page.goto(f"{self.ui}/runs/flow-run/{run}", wait_until="domcontentloaded")

    def retry(self) -> None:
        self.page.get_by_role("button", name="Retry").first.click()
        # The button of the page has the same name.
        self.page.get_by_role("dialog").get_by_role("button", name="Retry").click()
        self.page.get_by_role("dialog").wait_for(state="hidden")


class NewUi:
    """V2, below /v2."""

    def __init__(self, page: Page, ui: str) -> None:
        self.page = page
        self.ui = ui

    def open_run(self, run: UUID) -> None:
        self.page.goto(f"{self.ui}/v2/runs/flow-run/{run}", wait_until="domcontentloaded")

    def retry(self) -> None:
        self.page.get_by_role("button", name="Open menu").click()
        self.page.get_by_role("menuitem", name=re.compile("^Retry")).click()
        self.page.get_by_role("alertdialog").get_by_role("button", name="Retry").click()
        self.page.get_by_role("alertdialog").wait_for(state="hidden")

    def shoot_run(self, file: Path) -> None:
        """The run that is open: its head and the graph of its steps."""
        self.page.get_by_role("tab", name="Artifacts").click()
        # The graph is drawn on a canvas, which nothing but time tells to be ready.
        self.page.wait_for_timeout(3000)
        self.page.screenshot(path=file)

    def shoot_artifact(self, artifact: UUID, text: str, file: Path) -> None:
        self.page.goto(f"{self.ui}/v2/artifacts/artifact/{artifact}", wait_until="domcontentloaded")
        self.page.get_by_text(text).first.wait_for()
        self.page.screenshot(path=file)
