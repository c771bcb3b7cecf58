"""Links of the pages that lead out of docs/, for the site: to the repository where mkdocs.yml names one, else they become their text."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"\[([^\]\[]*)\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Called by mkdocs for each page. A link that leads nowhere in the checkout is left as it is, and so fails the build."""
    root, folder = Path(config.config_file_path).parent, Path(config.docs_dir, page.file.src_uri).parent

    def outside(match: re.Match[str]) -> str:
        text, target, anchor = match.groups()
        path = Path(os.path.normpath(folder / target))
        if path.is_relative_to(config.docs_dir) or not path.exists():
            return match[0]
        if not config.repo_url:
            return text
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path.relative_to(root)}{anchor or ''})"

    return LINK.sub(outside, markdown)
