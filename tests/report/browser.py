"""Chromium without a window, driven over two pipes by the DevTools protocol."""

import base64
import json
import os
import select
import shlex
import shutil
import subprocess
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATIENCE_S = 60


def find():
    """The browser's path, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of a browser, and all events it reported."""

    def __init__(self, folder):
        reads, self._commands = os.pipe()
        self._answers, writes = os.pipe()
        command = [
            find(), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-first-run", "--disable-background-networking", "--disable-component-update",
            "--disable-extensions", f"--user-data-dir={folder}", "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip
        script = f"exec {shlex.join(command)} 3<&{reads} 4>&{writes}"
        self._process = subprocess.Popen(
            ["bash", "-c", script],
            pass_fds=(reads, writes),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        os.close(reads)
        os.close(writes)
        self._pending, self._last, self._session = b"", 0, None
        self.events = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def close(self):
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def call(self, method, **params):
        """Send a command; its result."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _receive(self):
        until = time.monotonic() + PATIENCE_S
        while b"\0" not in self._pending:
            ready, _, _ = select.select([self._answers], [], [], max(0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            received = os.read(self._answers, 1 << 20)
            assert received, "the browser has ended"
            self._pending += received
        message, _, self._pending = self._pending.partition(b"\0")
        return json.loads(message)

    def evaluate(self, expression):
        """The value of a JavaScript expression; promises are awaited."""
        asked = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        answer = self.call("Runtime.evaluate", **asked)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def size(self, width, height=900):
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def prefer(self, scheme):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def open(self, path):
        """Load a page and wait until its figures are drawn."""
        self.events.clear()
        self.call("Page.navigate", url=path.absolute().as_uri())
        self.wait("document.documentElement?.dataset.drawn === 'yes'")

    def wait(self, condition):
        until = time.monotonic() + PATIENCE_S
        while not self.evaluate(condition):
            assert time.monotonic() < until, f"still not: {condition}"
            time.sleep(0.05)

    def screenshot(self, path):
        """The whole page as a picture, to look at."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def troubles(self):
        """Errors and warnings on the console, and exceptions nobody caught."""
        kinds = {"Runtime.exceptionThrown", "Log.entryAdded"}
        events = [each for each in self.events if each.get("method") in kinds]
        logged = [each for each in self.events if each.get("method") == "Runtime.consoleAPICalled"]
        return events + [each for each in logged if each["params"]["type"] in ("error", "warning", "assert")]

    def requests(self):
        """Every address the page asked for; data inside the page is none."""
        sent = [each for each in self.events if each.get("method") == "Network.requestWillBeSent"]
        urls = [each["params"]["request"]["url"] for each in sent]
        return [each for each in urls if not each.startswith("data:")]
