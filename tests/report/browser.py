"""A real headless Chromium, driven through ChromeDriver's own HTTP interface; nothing is downloaded."""

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DRIVERS = ("chromedriver", "chromium-driver", "chromium.chromedriver")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
RIGHT, TAB, SPACE = "\ue014", "\ue004", " "


def find(names: Sequence[str]) -> str | None:
    """The path of the first of these programs that is installed."""
    return next((path for name in names if (path := shutil.which(name))), None)


def missing() -> str:
    """The reason to skip: the Debian packages that are missing; empty if the browser and its driver are installed."""
    wanted = {"chromium": BROWSERS, "chromium-driver": DRIVERS}
    absent = [f"{package} ({' or '.join(names)})" for package, names in wanted.items() if find(names) is None]
    packages = " ".join(each.split()[0] for each in absent)
    return f"the page needs {' and '.join(absent)}: apt-get install {packages}" if absent else ""


class Browser:
    """One session."""

    def __init__(self, url: str) -> None:
        self._url = url

    def call(self, path: str, **body: Any) -> Any:
        """One command of the WebDriver protocol."""
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.loads(response.read())["value"]

    def open(self, path: Path) -> None:
        """A file from disk."""
        self.call("/url", url=path.resolve().as_uri())

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns."""
        return self.call("/execute/sync", script=script, args=list(arguments))

    def press(self, selector: str, keys: str) -> None:
        """Type on an element."""
        element = next(iter(self.call("/element", using="css selector", value=selector).values()))
        self.call(f"/element/{element}/value", text=keys)

    def emulate(self, command: str, **parameters: Any) -> None:
        """A command of Chromium's own protocol."""
        self.call("/goog/cdp/execute", cmd=command, params=parameters)


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [find(DRIVERS) or DRIVERS[0], f"--port={port}"]
    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    session = None
    try:
        root = Browser(f"http://127.0.0.1:{port}")
        options = {"binary": find(BROWSERS), "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options}}
        for attempt in range(100):
            try:
                made = root.call("/session", capabilities=wanted)
                break
            except urllib.error.URLError:
                if attempt == 99 or driver.poll() is not None:
                    raise
                time.sleep(0.1)
        session = Browser(f"http://127.0.0.1:{port}/session/{made['sessionId']}")
        yield session
    finally:
        if session is not None:
            request = urllib.request.Request(session._url, method="DELETE")
            urllib.request.urlopen(request, timeout=30).close()
        driver.terminate()
        driver.wait(30)
