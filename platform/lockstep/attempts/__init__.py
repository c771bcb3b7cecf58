"""Attempts: one run on Ray, supervised from its first worker to its last, and started again when something is lost."""
