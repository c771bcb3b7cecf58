"""When a run evaluates, which process computes it, and at which step it decides."""
