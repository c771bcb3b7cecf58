"""Specs for the tests of the record, and one SQLite database for all of them: a fresh one costs 2.4 s."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lockstep.spec.fields import Spec
from lockstep.spec.loading import load_spec
from tests.unit.record.server import Server

THIRD_PARTY = (
    "ignore::DeprecationWarning",  # mlflow, sqlalchemy, alembic and what they import
    "ignore::PendingDeprecationWarning",
    "ignore::FutureWarning",
    "ignore::UserWarning",  # of mlflow.pytorch, about type hints of its own
    "ignore::ResourceWarning",  # mlflow keeps its SQLite connections until the process ends
)

MLFLOW = {
    "test_mlflow.py",
    "test_outage.py",
    "test_partial_store.py",
    "test_store_faults.py",
    "test_record_differences.py",
    "test_stores.py",
    "test_final_model_files.py",
    "test_checkpoint_copies.py",
    "test_checkpoint_models.py",
    "test_strangers.py",
    "test_kept_checkpoints.py",
    "test_ui.py",
    "test_liveness.py",
    "test_troubles_at_once.py",
    "test_locked_database.py",
}


_THERE = {path.name for path in Path(__file__).parent.rglob("test_*.py")}
assert MLFLOW <= _THERE, f"MLFLOW names files that are not there: {sorted(MLFLOW - _THERE)}"


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Warnings are errors, but for those that come out of MLflow in the tests that open it."""
    for item in items:
        if Path(__file__).parent in item.path.parents and item.path.name in MLFLOW:
            for text in THIRD_PARTY:
                item.add_marker(pytest.mark.filterwarnings(text))


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    """URI of a SQLite database that is made by the first test that opens it."""
    return f"sqlite:///{tmp_path_factory.mktemp('a folder #é 5%')}/mlflow.db"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A tracking server that no test kills."""
    with Server(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def spec(tmp_path: Path) -> Callable[..., Spec]:
    """Specs that keep their runs below tmp_path."""

    def build(uri: str = "off", **sections: Any) -> Spec:
        document = {
            "name": "digits",
            "job": {"use": "jobs.digits.job:Digits"},
            "record": {"uri": uri},
            **sections,
        }
        return load_spec({**document, "checkpoint": {"storage": str(tmp_path / "runs")}})

    return build
