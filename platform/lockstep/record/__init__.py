"""The record of a run: the ledger in its own folder, and MLflow, both written by one recorder off the training path."""
