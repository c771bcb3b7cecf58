"""Each page is in the site's navigation, and links out of docs/ have somewhere to go."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

from tests.site_links import on_page_markdown

ROOT = Path(__file__).parents[2]


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r"[\w/-]+\.md", nav)
    assert sorted(listed) == sorted(
        str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")
    )


def test_links_out_of_the_pages_lead_to_the_repository_or_become_text() -> None:
    def shown(markdown: str, repo_url: str) -> str:
        config = SimpleNamespace(
            docs_dir=str(ROOT / "docs"), config_file_path=str(ROOT / "mkdocs.yml"), repo_url=repo_url
        )
        page = SimpleNamespace(file=SimpleNamespace(src_uri="decisions/0002-no-loader-state.md"))
        return on_page_markdown(markdown, page=page, config=config, files=None)

    text = "see [the rule](../../Makefile#L3), [a page](../spec.md), [gone](../../no/such.py)"
    # The last one fails the build.
    assert shown(text, "") == "see the rule, [a page](../spec.md), [gone](../../no/such.py)"
    assert "[the rule](https://host/us/blob/main/Makefile#L3)" in shown(text, "https://host/us/")
