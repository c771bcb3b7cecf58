"""What a job takes from its process and machine that no spec names."""
