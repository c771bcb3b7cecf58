"""Training: from the spec and the job to the weights, one exact step after another."""
