"""Runs stored in MLflow: the only package that imports it, and only when a store is opened."""

from lockstep.record.mirror.mlflow.reading import (
    checkpoint_copies,
    files_from_mlflow,
    finished_in_mlflow,
    in_mlflow,
    recorded_in_mlflow,
)
from lockstep.record.mirror.mlflow.run import MlflowStore
from lockstep.record.mirror.mlflow.stored_texts import stored_values

__all__ = [
    "MlflowStore",
    "checkpoint_copies",
    "files_from_mlflow",
    "finished_in_mlflow",
    "in_mlflow",
    "recorded_in_mlflow",
    "stored_values",
]
