"""Whether a recorded run lives, how it ended, and whether its records agree."""
