"""The rehearsal: the promise is tried on the user's own job before a long run."""
