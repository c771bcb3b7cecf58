"""Secrets in URIs, wherever they stand, are hidden; what is none stays."""

from __future__ import annotations

import pytest

from lockstep.record.redaction import document_without_uri_secrets, without_uri_secrets


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("postgresql+psycopg://me:hunter2@db/mlflow", "postgresql+psycopg://me:***@db/mlflow"),
        ("postgresql://me:pa/ss@db:5432/mlflow", "postgresql://me:***@db:5432/mlflow"),
        ("postgresql://me:p@ss@db:5432/mlflow", "postgresql://me:***@db:5432/mlflow"),
        ("postgresql://me:p@s/s@db:5432/mlflow", "postgresql://me:***@db:5432/mlflow"),
        ("postgresql://me:p?s#s@db/mlflow", "postgresql://me:***@db/mlflow"),
        ("postgresql://me:p%40ss@db/mlflow", "postgresql://me:***@db/mlflow"),
        ("postgresql://db/mlflow?user=me&password=hunter2", "postgresql://db/mlflow?user=me&password=***"),
        ("https://ghp_0123456789@github.com/a/b", "https://***@github.com/a/b"),
        ("http://:hunter2@host", "http://:***@host"),
        ("https://h/p?a=1&access_token=abc&b=2#f", "https://h/p?a=1&access_token=***&b=2#f"),
        ("https://s3/k?X-Amz-Signature=abc&X-Amz-Date=1", "https://s3/k?X-Amz-Signature=***&X-Amz-Date=1"),
        ("https://h/cb#id_token=abc&state=1", "https://h/cb#id_token=***&state=1"),
    ],
)
def test_a_secret_in_a_uri_is_hidden(given: str, shown: str) -> None:
    assert without_uri_secrets(given) == shown
    assert without_uri_secrets(f"cannot reach '{given}' (or {given}), again") == (
        f"cannot reach '{shown}' (or {without_uri_secrets(given + '),')} again"
    )
    assert document_without_uri_secrets({"record": {"uri": given}, "list": [given]}) == {
        "record": {"uri": shown},
        "list": [shown],
    }
    assert without_uri_secrets(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "sqlite:////data/a@b/mlflow.db",
        "http://host:5000/path/a@b",
        "http://host:5000/path?mail=a@b.c&page=2",
        "postgresql://me@db/mlflow",
        "s3://bucket/a@b/c",
        "me@host: no URI, 10:30@night",
        "http://[::1]:5000/x",
        "https://host/path#key",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert without_uri_secrets(text) == text
    assert document_without_uri_secrets([text, 1, None, True]) == [text, 1, None, True]


def test_a_text_that_is_a_uri_may_have_any_character_in_its_password() -> None:
    assert (
        document_without_uri_secrets("postgresql://me:a b'c\"d@db/mlflow") == "postgresql://me:***@db/mlflow"
    )


@pytest.mark.parametrize("text", ['f"http://[{host}]:{port}"', "see http://[1]/x", "a://[::1/"])
def test_what_only_looks_like_a_uri_is_left_as_it_is(text: str) -> None:
    """A git diff or a stack holds such texts; a record must not end over one."""
    assert without_uri_secrets(text) == text
    assert document_without_uri_secrets({"diff": text}) == {"diff": text}
