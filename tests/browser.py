"""Opens pages in Chromium, without a window, and reports what it sees. Nothing but the pages is asked for."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PHONE_WIDTH = 390
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
# A frame can be as narrow as a phone, which a window cannot.
_OPENER = """<!DOCTYPE html><script>
const look = (path, width) => new Promise(resolve => {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width: ${width}px; height: 800px; border: 0`;
  frame.onload = () => setTimeout(() => {
    const page = frame.contentDocument, root = page.documentElement;
    const images = [...page.images].filter(image => !image.complete || image.naturalWidth === 0);
    resolve({
      path, title: page.title, text: page.body.innerText, excess: root.scrollWidth - root.clientWidth,
      broken: images.map(image => image.src),
      requests: frame.contentWindow.performance.getEntriesByType("resource").map(entry => entry.name),
    });
    frame.remove();
  }, 50);
  frame.src = path;
  document.body.append(frame);
});
onload = async () => {
  const seen = [];
  for (const path of PATHS) seen.push(await look(path, WIDTH));
  fetch("/seen", {method: "POST", body: JSON.stringify(seen)});
};
</script><body>"""


class Page(NamedTuple):
    path: str
    title: str
    text: str
    excess: int
    """Pixels by which it is wider than the screen."""
    broken: list[str]
    """Images that did not load."""
    requests: list[str]


def open_pages(folder: Path, paths: Sequence[str], profile: Path, width: int = PHONE_WIDTH) -> list[Page]:
    """Open pages of a folder, one after the other, on a screen as wide as a phone's. ``profile`` is an empty folder."""
    assert CHROMIUM is not None
    answer: list[dict[str, Any]] = []
    arrived = threading.Event()

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/opener":
                super().do_GET()
                return
            page = _OPENER.replace("PATHS", json.dumps(list(paths))).replace("WIDTH", str(width)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(page)

        def do_POST(self) -> None:
            answer.extend(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()
            arrived.set()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        browser = subprocess.Popen(
            [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "--remote-debugging-port=0", f"{address}/opener"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert arrived.wait(300), "the browser did not answer"
        finally:
            browser.terminate()
            browser.wait()
            server.shutdown()
    foreign = [
        request
        for page in answer
        for request in page["requests"]
        if not request.startswith((address, "data:", "blob:"))
    ]
    assert foreign == []
    return [Page(**page) for page in answer]
