"""A headless browser for tests: Chromium as QtWebEngine carries it, from the package PySide6-WebEngine.

As a program it reads {url, width, height, steps, picture} from standard input. Each step is an expression of
JavaScript, evaluated until its value is neither null nor false; the values, the console's messages and the addresses
that were asked for are printed as JSON.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

needs_browser = pytest.mark.skipif(
    find_spec("PySide6") is None or find_spec("PySide6.QtWebEngineWidgets") is None,
    reason="no browser: pip install PySide6-WebEngine",
)
_STEP = 30.0  # seconds for one step


def browse(
    url: str, *steps: str, width: int = 1200, height: int = 900, picture: Path | None = None, dark: bool = False
) -> dict[str, Any]:
    """Open a page, evaluate the steps one after another and return ``values``, ``messages`` and ``asked``."""
    task = {"url": url, "width": width, "height": height, "steps": steps, "picture": str(picture or "")}
    environment = {**os.environ, "QT_QPA_PLATFORM": "offscreen", "QTWEBENGINE_DISABLE_SANDBOX": "1"}
    scheme = 0 if dark else 1
    environment["QTWEBENGINE_CHROMIUM_FLAGS"] = f"--disable-gpu --blink-settings=preferredColorScheme={scheme}"
    done = subprocess.run(
        [sys.executable, __file__], input=json.dumps(task), env=environment, capture_output=True, text=True,
        timeout=60 + _STEP * len(steps),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert not result["stuck"], result
    return result


def main() -> None:
    from PySide6.QtCore import QTimer, QUrl
    from PySide6.QtWebEngineCore import QWebEnginePage, QWebEngineUrlRequestInterceptor
    from PySide6.QtWebEngineWidgets import QWebEngineView
    from PySide6.QtWidgets import QApplication

    task = json.load(sys.stdin)
    app = QApplication(["browser"])
    values: list[Any] = []
    messages: list[str] = []
    asked: list[str] = []

    class Interceptor(QWebEngineUrlRequestInterceptor):
        def interceptRequest(self, info: Any) -> None:
            asked.append(info.requestUrl().toString())

    class Page(QWebEnginePage):
        def javaScriptConsoleMessage(self, level: Any, message: str, line: int, source: str) -> None:
            messages.append(f"{source}:{line}: {message}")

    view = QWebEngineView()
    page, interceptor = Page(view), Interceptor()
    page.setUrlRequestInterceptor(interceptor)
    view.setPage(page)
    view.resize(task["width"], task["height"])

    def end(stuck: str = "") -> None:
        if task["picture"]:
            view.grab().save(task["picture"])
        print(json.dumps({"values": values, "messages": messages, "asked": asked, "stuck": stuck}), flush=True)
        os._exit(0)  # Qt's own end takes long

    def step(left: float = _STEP) -> None:
        if len(values) == len(task["steps"]):
            QTimer.singleShot(300, end)
            return
        code = task["steps"][len(values)]

        def answered(text: str) -> None:
            value = json.loads(text) if text else None
            if value is None or value is False:
                if left <= 0:
                    end(code)
                QTimer.singleShot(100, lambda: step(left - 0.1))
                return
            values.append(value)
            step()

        page.runJavaScript(f"JSON.stringify({code})", answered)

    page.loadFinished.connect(lambda _: step())
    page.load(QUrl(task["url"]))
    view.show()
    QTimer.singleShot(int(1000 * _STEP * (len(task["steps"]) + 1)), lambda: end("the whole page"))
    app.exec()


if __name__ == "__main__":
    main()
