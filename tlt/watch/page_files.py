"""The files of the page: scripts, style and the document, as they are served, and as one script inside a page."""

import re
from pathlib import Path

PAGE = Path(__file__).with_name("page")
SERVED = {  # what the live page and an export consist of, with their media types
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "draw.js": "text/javascript; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
}
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./[\w.]+";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=function|class|const)", re.MULTILINE)


def read_page(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


def bundled(*names: str) -> str:
    """Modules as one: each after those that it imports."""
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", read_page(name))) for name in names)
