"""Checks: what can be known before a long run."""
