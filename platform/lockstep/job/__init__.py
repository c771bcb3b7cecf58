"""The job: what a user writes, how it is loaded, its source, and the identity that a run has with it."""
