"""The S3 server of the store's tests."""

from __future__ import annotations

from tests.unit.checkpoint.conftest import s3

__all__ = ["s3"]
