"""What drives a run, with Ray or without: progress, signals, the result, and a run in this very process."""
