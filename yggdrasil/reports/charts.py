"""Embeds Plotly charts in an HTML page: their data as JSON, and the compressed chart library.

The page decompresses the library when it is opened. Compressed and base-85 encoded its 4.8 MB take 1.8 MB, so a page
stays below 2 MB.
"""

import base64
import zlib
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from yggdrasil.reports.figures import Figure

_SWAPPED = (b"<", b",")  # replaces "<" in the encoded text, which could open a tag or a comment

_LOADER = """
const alphabet = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;,=>?@^_`{|}~";
const value = new Uint8Array(128);
[...alphabet].forEach((letter, i) => { value[letter.charCodeAt(0)] = i; });
function unpacked(text) {
  const short = (5 - text.length % 5) % 5, padded = text + "~".repeat(short);
  const bytes = new Uint8Array(padded.length / 5 * 4), view = new DataView(bytes.buffer);
  for (let i = 0; i < padded.length; i += 5) {
    let number = 0;
    for (let j = 0; j < 5; j++) number = number * 85 + value[padded.charCodeAt(i + j)];
    view.setUint32(i / 5 * 4, number);
  }
  return bytes.subarray(0, bytes.length - short);
}
const DARKENED = {  // colours of marks that would be lost on a dark page
  "#1f2933": "#d9e2ec", "#0b6e4f": "#4fc79a", "rgba(11,110,79,": "rgba(79,199,154,", "#3d5a80": "#7ea6d9",
  "rgba(61,90,128,": "rgba(126,166,217,", "#6a4c93": "#b295dd", "#4f772d": "#8fbf5f", "#5c6b73": "#93a4ae",
};
const isDark = matchMedia("(prefers-color-scheme: dark)");
function coloured(layout) {
  const template = JSON.parse(document.getElementById("template").textContent);
  const [ink, grid, paper] = isDark.matches ? ["#d9e2ec", "#334e68", "#14212b"] : ["#1f2933", "#e4e7eb", "#ffffff"];
  const changed = {...layout, template, paper_bgcolor: paper, plot_bgcolor: paper, font: {...layout.font, color: ink}};
  for (const name of Object.keys(layout).filter(name => /^[xy]axis/.test(name)))
    changed[name] = {...layout[name], gridcolor: grid, zerolinecolor: grid};
  return changed;
}
function draw() {
  for (const data of document.querySelectorAll("script[data-chart]")) {
    const pairs = isDark.matches ? Object.entries(DARKENED) : [];
    const figure = JSON.parse(pairs.reduce((text, [light, dark]) => text.replaceAll(light, dark), data.textContent));
    const place = document.getElementById(data.dataset.chart);
    const width = Math.max(place.clientWidth, figure.layout.meta.least_width);  // a narrower place scrolls
    const layout = {...coloured(figure.layout), width, dragmode: innerWidth > 640 && "zoom"};  // a finger scrolls
    Plotly.newPlot(place, figure.data, layout, {displayModeBar: false});  // react() leaves the legend on the title
  }
}
const library = document.getElementById("library");
if (library) {
  const packed = new Blob([unpacked(library.textContent.trim())]).stream();
  new Response(packed.pipeThrough(new DecompressionStream("deflate"))).text().then(code => {
    const script = document.createElement("script");
    script.textContent = code;
    document.head.append(script);
    draw();
    isDark.addEventListener("change", draw);
    let width = innerWidth;
    addEventListener("resize", () => {  // not where a phone's address bar goes: that changes the height
      if (innerWidth === width) return;
      width = innerWidth;
      draw();
    });
  });
}
"""


class Charts:
    """The charts of one page, numbered in the order of ``add``."""

    def __init__(self) -> None:
        self._count = 0
        self._template: object = {}

    def add(self, figure: "Figure | None") -> str:
        """Return the HTML of a Plotly figure: its container, and its data, which ``scripts`` draws; "" for None."""
        if figure is None:
            return ""
        self._count += 1
        plain = figure.to_plotly_json()
        self._template = plain["layout"].pop("template", self._template)  # the same in all: stored once
        data = _json(plain)
        name = f"chart-{self._count}"
        return (
            f'<div class="chart" id="{name}"></div><script type="application/json" data-chart="{name}">{data}</script>'
        )

    def scripts(self) -> str:
        """Return the script elements that draw the charts, for the end of the page; "" if there are none."""
        if not self._count:
            return ""
        template = f'<script type="application/json" id="template">{_json(self._template)}</script>'
        return f'{template}<script type="text/plain" id="library">{_library()}</script>\n<script>{_LOADER}</script>'


def _json(value: object) -> str:
    from plotly.io.json import to_json_plotly

    return str(to_json_plotly(value)).replace("</", "<\\/")


@cache
def _library() -> str:
    from plotly.offline import get_plotlyjs

    packed = base64.b85encode(zlib.compress(get_plotlyjs().encode(), 9))
    return packed.replace(*_SWAPPED).decode()
