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


_IN_URI = re.compile(r"""://([^\s/?#]*:)?\*{3}@|://.*[?&#][^=&]+=\*{3}(?![^&#\s'"<>`])""")
"""Where `HIDDEN` stands for one; elsewhere it is a text like another."""


def is_redacted(text: str) -> bool:
    """Whether a secret was in a text."""
    return MARK.search(text) is not None or _IN_URI.search(text) is not None


def is_mark(text: str) -> bool:
    """Whether a text is what stands for a secret, and nothing else."""
    return text == HIDDEN or MARK.fullmatch(text) is not None
