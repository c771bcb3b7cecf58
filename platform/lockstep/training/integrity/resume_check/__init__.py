"""A spare process that takes up a checkpoint while the run goes on, and shows that the run can be resumed."""
