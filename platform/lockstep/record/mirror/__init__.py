"""What a store shows of a run: projected from the log, and sent to MLflow or to a folder."""
