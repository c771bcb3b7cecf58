"""Orchestration: where the workers of a run come from, and who listens to them."""
