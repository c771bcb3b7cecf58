"""Events: what a run reports, how each is written down, and the metrics that follow from them."""
