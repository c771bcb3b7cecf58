"""One optimizer step: its micro-batches, its sum, its update."""
