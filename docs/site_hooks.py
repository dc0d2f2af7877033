"""Hooks of mkdocs.yml: pages and files from outside docs/, titles of code blocks, pipes in tables.

GitHub and the site read the same Markdown. A link such as `../examples/gsm8k_grpo.py` works in a checkout. Here the
file joins the site and the link points at the copy.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)")
TABLE_ROW, CODE = re.compile(r"^\|.*\|$", re.M), re.compile(r"`[^`]+`")
FENCE = re.compile(r"^```(\w+) (append )?([\w./-]+)$", re.M)


def target_of(source: str, link: str) -> str | None:
    """The path in the repository of a link on page `source` (a path in the repository); None for no file."""
    path = os.path.normpath(os.path.join(os.path.dirname(source), link))
    return path if (ROOT / path).is_file() else None


def repository_path(uri: str) -> str:
    """`index.md` of the site is docs/index.md of the repository; pages of the root stay where they are."""
    return uri if uri in ROOT_PAGES else f"docs/{uri}"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the root's pages, and every file outside docs/ that a page links to."""
    for name in ROOT_PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for page in [file for file in files if file.is_documentation_page()]:
        for link, _ in LINK.findall(page.content_string):
            target = target_of(repository_path(page.src_uri), link)
            if target and not target.startswith("docs/") and target not in files.src_uris:
                files.append(File.generated(config, target, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links at the site's copies, and turns the file name behind a code fence into the block's title.

    Unescapes pipes in the code of tables: GitHub needs the backslash, Python-Markdown would show it.
    """
    source = page.file.src_uri

    def rewritten(match: re.Match[str]) -> str:
        link, anchor = match[1], match[2] or ""
        target = target_of(repository_path(source), link)
        if target is None:
            return match[0]  # MkDocs reports it
        uri = target.removeprefix("docs/")
        return f"]({os.path.relpath(uri, os.path.dirname(source) or '.')}{anchor})"

    markdown = TABLE_ROW.sub(lambda row: CODE.sub(lambda code: code[0].replace(r"\|", "|"), row[0]), markdown)
    markdown = FENCE.sub(lambda m: f'```{m[1]} title="{m[3]}{" (appended)" if m[2] else ""}"', markdown)
    return LINK.sub(rewritten, markdown)
