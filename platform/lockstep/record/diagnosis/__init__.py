"""What a run's rows show to be wrong with it."""
