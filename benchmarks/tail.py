"""A picture of the long tail: how many answers of a rollout are still being written, over time, in each way.

    python benchmarks/tail.py RECORD.json OUT.svg [--ways "plain;tuner, warm"]

RECORD is what `speculation.py measure` wrote. The SVG stands alone: a README can show it.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from line_chart import Axis, Line, line_chart, standalone

WAYS = ("plain", "tuner, warm")
NAMES = {"plain": "plain decoding", "tuner, warm": "TLT", "tuner": "TLT, first rollout"}


def picture(finished_s: dict[str, Sequence[float]], ways: Sequence[str]) -> str:
    """Each way a line that falls by one whenever an answer ends."""
    lines = [
        Line(NAMES.get(way, way), still_running(finished_s[way]), f"c{number}", steps=True)
        for number, way in enumerate(ways, 1)
    ]
    chart = line_chart(lines, Axis("seconds", include=(0.0,)), Axis("answers still being written", include=(0.0,)))
    keys = [(line.colour, f"{line.label}, {finished_s[way][-1]:.1f} s") for line, way in zip(lines, ways, strict=True)]
    return standalone(chart, keys)


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
