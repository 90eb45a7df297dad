"""The page of a run or several: style, scripts and data in one file. It has the data inside (a report) or asks the
server that it came from (``whet watch``).

Every string passes through ``escape_controls``; the scripts write text nodes only.
"""

import base64
import hashlib
import json
from pathlib import Path

from whet.base.escaping import escape_controls

_ASSETS = Path(__file__).parent / "assets"
_SCRIPTS = ("elements.js", "charts.js", "rollouts.js", "page.js")
_MARKUP = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def page(data: dict[str, object] | None, title: str) -> str:
    """Return the page. ``data``: ``{"runs": [...]}`` of a report; None for a page that asks its server."""
    style = (_ASSETS / "page.css").read_text("utf-8")
    script = '"use strict";\n' + "\n".join((_ASSETS / name).read_text("utf-8") for name in _SCRIPTS)
    connects = "" if data is not None else "; connect-src 'self'"
    values = {
        "title": _attribute(escape_controls(title)),
        "policy": f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'{connects}; "
        "img-src data:; "
        "base-uri 'none'; form-action 'none'",
        "style": style,
        "script": script,
        "data": encode(data).translate(_MARKUP),
    }
    parts = (_ASSETS / "page.html").read_text("utf-8").split("%%")  # text and names take turns
    return "".join(values[part] if i % 2 else part for i, part in enumerate(parts))


def encode(value: object) -> str:
    """Return a value as JSON whose strings are safe to display."""
    return json.dumps(_escaped(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _escaped(value: object) -> object:
    if isinstance(value, str):
        return escape_controls(value)
    if isinstance(value, dict):
        return {_escaped(key): _escaped(part) for key, part in value.items()}
    return [_escaped(part) for part in value] if isinstance(value, list | tuple) else value


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
