"""Makes the page's HTML: one inline script and style, inert data, and a Content-Security-Policy that admits no more.

The report embeds a run's data; the dashboard's page asks for them. Both draw by the same script.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
SCRIPTS = ("charts.js", "samples.js", "board.js")


def style() -> str:
    """The page's style sheet."""
    return (FOLDER / "board.css").read_text(encoding="utf-8")


def script() -> str:
    """The page's script: the three files one after the other."""
    return "'use strict';\n" + "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in SCRIPTS)


def document(title: str, data: Mapping[str, Any]) -> str:
    """The whole page. `data` is embedded as JSON in a block that browsers do not run."""
    policy = html.escape(content_policy())
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{html.escape(title)}</title><link rel='icon' href='data:,'><style>{style()}</style></head><body>"
        "<noscript>This page draws by a script of its own; switch JavaScript on.</noscript><main id='board'></main>"
        f"<script type='application/json' id='data'>{inert_json(data)}</script>"
        f"<script>{script()}</script></body></html>"
    )


def content_policy() -> str:
    """The Content-Security-Policy: only our script and style, by their hashes, and requests to our own server."""
    return (
        f"default-src 'none'; script-src '{_hash(script())}'; style-src '{_hash(style())}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def inert_json(value: Any) -> str:
    """JSON in ASCII without `<`, `>` and `&`: no text in it can end its block or begin a tag."""
    text = json.dumps(value, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    """Source expression that admits an inline block (CSP level 3)."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
