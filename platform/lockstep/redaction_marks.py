"""What stands in a record where a secret was, so that whoever needs the secret can tell."""

from __future__ import annotations

import re

HIDDEN = "***"
"""What replaces a secret of a URI."""

MARK = re.compile(r"<redacted: [^<>]+>")
"""What replaces any other, and says what it was."""


def marked(kind: str) -> str:
    """The mark of a secret of this kind."""
    return f"<redacted: {kind}>"


def is_redacted(text: str) -> bool:
    """Whether a secret was in a text."""
    return HIDDEN in text or MARK.search(text) is not None
