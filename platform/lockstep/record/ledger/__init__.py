"""The log of a run and its tables, in the run's own folder."""
