"""An MLflow database without a run. To make one takes seconds, and is shown in the tests of the record."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from tests.forked import script


def put_empty_store(path: Path) -> str:
    """Put the database there, unless there is one; its URI."""
    if not path.exists():
        path.write_bytes(_empty_store())
    return f"sqlite:///{path}"


@cache
def _empty_store() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        made = script(
            f"import mlflow; mlflow.MlflowClient('sqlite:///{folder}/mlflow.db').search_experiments()"
        )
        assert made.wait() == 0
        return Path(folder, "mlflow.db").read_bytes()
