"""Width of the built documentation on a phone: `python -m tests.page_width site`, in Chromium."""

import functools
import http.server
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PHONE_WIDTH = 390
LIMIT_S = 60
MEASURE = """<body><script>
(async () => {
  const wide = {};
  for (const page of %s) {
    const frame = document.createElement("iframe");
    frame.style = "width: %dpx; height: 800px; border: 0";
    frame.src = page;
    document.body.append(frame);
    await new Promise((done) => { frame.onload = done; });
    const { scrollWidth, clientWidth } = frame.contentDocument.documentElement;
    if (scrollWidth > clientWidth) wide[page] = scrollWidth;
    frame.remove();
  }
  await fetch("/", { method: "POST", body: JSON.stringify(wide) });
})();
</script>"""


class Handler(http.server.SimpleHTTPRequestHandler):
    """Handler that serves the pages of the site and receives their widths."""

    server: "Server"

    def do_POST(self) -> None:
        """Take the result of the measurement."""
        self.server.result = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_error(http.HTTPStatus.NO_CONTENT)
        self.server.measured.set()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class Server(http.server.ThreadingHTTPServer):
    """Server of the site, with the widths of its pages once they were measured."""

    def __init__(self, site: Path) -> None:
        super().__init__(("127.0.0.1", 0), functools.partial(Handler, directory=str(site)))
        self.measured = threading.Event()
        self.result: dict[str, int] = {}


def wide_pages(site: Path, browser: str) -> dict[str, int]:
    """Find the pages that are wider than a phone, and their widths."""
    pages = sorted(f"/{path.relative_to(site)}" for path in site.rglob("*.html"))
    measure = site / "measure.html"
    measure.write_text(MEASURE % (json.dumps(pages), PHONE_WIDTH))
    options = ["--headless", "--no-sandbox", "--disable-gpu"]
    with Server(site) as server, tempfile.TemporaryDirectory() as profile:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/{measure.name}"
        command = [browser, *options, f"--user-data-dir={profile}", url]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            ended = server.measured.wait(LIMIT_S)
            process.terminate()
        server.shutdown()
        measure.unlink()
        assert ended, f"{browser} did not measure the pages within {LIMIT_S} s"
        return server.result


def main() -> int:
    """Measure every page; 1 when one is too wide."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.stderr.write("no Chromium is installed: the width of the pages is not checked\n")
        return 0
    wide = wide_pages(Path(sys.argv[1]), browser)
    for page, width in wide.items():
        sys.stderr.write(f"{page}: {width} pixels wide on a phone of {PHONE_WIDTH}\n")
    return 1 if wide else 0


if __name__ == "__main__":
    sys.exit(main())
