"""`python -m tests.page.screenshots` makes the pictures of docs/page.md: three nodes under load for some minutes, of
which one is killed before the last picture."""

from __future__ import annotations

import io
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

from tests.page.browser import LAPTOP, PHONE, Shown, started, url_of
from tests.page.load import Load, three_nodes

DOCS = Path(__file__).parents[2] / "docs"
PICTURES = {
    "page-light": (LAPTOP, {"color_scheme": "light"}, True),
    "page-dark": (LAPTOP, {"color_scheme": "dark"}, True),
    "page-phone": (PHONE, {"color_scheme": "light"}, False),
}
"""By name of the file: the size of the tab, its options, and whether the picture has all of the page."""
LOAD_S = 240.0
MAX_BYTES = 200_000


def main() -> None:
    """Make all pictures. An argument is the number of seconds of load before them."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else LOAD_S
    with tempfile.TemporaryDirectory() as directory, three_nodes(Path(directory)) as cluster, started() as browser:
        load = Load(cluster, requests_per_s=10.0)
        try:
            time.sleep(seconds)
            url = url_of(cluster.nodes[0])
            tabs = {}
            for name, (size, options, whole) in PICTURES.items():
                tabs[name] = Shown(browser, size, **options)
                tabs[name].open(url)
                # Rates need two states.
                tabs[name].page.wait_for_timeout(5000)
                _save(tabs[name], name, whole=whole)
            cluster.nodes[2].kill()
            dark = tabs["page-dark"]
            dark.page.locator("#events .warning").get_by_text("gpu-c").wait_for()
            _save(dark, "page-dead-node", whole=False)
        finally:
            load.close()


def _save(tab: Shown, name: str, *, whole: bool) -> None:
    path = DOCS / f"{name}.png"
    picture = Image.open(io.BytesIO(tab.page.screenshot(full_page=whole))).convert("RGB")
    picture.quantize(256, kmeans=3, dither=Image.Dither.NONE).save(path, optimize=True)
    size = path.stat().st_size
    assert size <= MAX_BYTES, f"{path} has {size} bytes"
    print(f"{path.name}: {size:,} bytes")


if __name__ == "__main__":
    main()
