"""A picture of the long tail: how many answers of a rollout are still being written, over time, in each way.

    python benchmarks/tail.py RECORD.json OUT.svg [--ways "plain;tuner, warm"]

RECORD is what `speculation.py measure` wrote. The SVG stands alone: a README can show it.
"""

import argparse
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from line_chart import HEIGHT, TOP, WIDTH, Axis, Line, line_chart

WAYS = ("plain", "tuner, warm")
NAMES = {"plain": "plain decoding", "tuner, warm": "TLT", "tuner": "TLT, first rollout"}
STYLE = """
svg { background: #fff; font-family: system-ui, sans-serif; }
text { font-size: 11.5px; fill: #5f6368; } .key { font-size: 12.5px; fill: #202124; }
.grid { stroke: #e8eaed; } .base, .tick { stroke: #9aa0a6; } .hit { fill: transparent; }
.line { fill: none; stroke: currentColor; stroke-width: 2; stroke-linejoin: round; }
.c1 { color: #80868b; } .c2 { color: #1967d2; } .c3 { color: #e37400; } .c4 { color: #188038; }
"""


def picture(finished_s: dict[str, Sequence[float]], ways: Sequence[str]) -> str:
    """Each way a line that falls by one whenever an answer ends."""
    lines = [
        Line(NAMES.get(way, way), still_running(finished_s[way]), f"c{number}", steps=True)
        for number, way in enumerate(ways, 1)
    ]
    chart = line_chart(lines, Axis("seconds", include=(0.0,)), Axis("answers still being written", include=(0.0,)))
    keys = "".join(
        f'<g class="{line.colour}"><path class="line" d="M{WIDTH - 200} {TOP + 16 + 18 * number}h22"/></g>'
        f'<text class="key" x="{WIDTH - 172}" y="{TOP + 20 + 18 * number}">'
        f"{escape(line.label)}, {finished_s[way][-1]:.1f} s</text>"
        for number, (line, way) in enumerate(zip(lines, ways, strict=True))
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}"'
    body = chart.replace("<svg", f"{head}", 1).replace("</svg>", f"{keys}</svg>")
    start = body.index(">") + 1
    return f"{body[:start]}<style>{STYLE}</style>{body[start:]}\n"


def still_running(finished_s: Sequence[float]) -> list[tuple[float, float]]:
    ends = sorted(finished_s)
    return [(0.0, float(len(ends)))] + [(second, float(len(ends) - 1 - index)) for index, second in enumerate(ends)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ways", default=";".join(WAYS), help="those to show, divided by ;")
    options = parser.parse_args(arguments)
    finished_s = json.loads(options.record.read_text(encoding="utf-8"))["finished_s"]
    ways = [way for way in options.ways.split(";") if way in finished_s]
    if not ways:
        parser.error(f"{options.record} has none of {options.ways}; it has {'; '.join(finished_s)}")
    options.out.write_text(picture(finished_s, ways), encoding="utf-8")
    print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
