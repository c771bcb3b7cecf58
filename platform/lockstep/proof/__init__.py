"""Checking what is recorded: steps of a run taken again, and compared bit for bit."""
