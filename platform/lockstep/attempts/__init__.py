"""Attempts: one run on Ray, watched from its first worker to its last, and started again when something is lost."""
