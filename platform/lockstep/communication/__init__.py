"""The process group of a run, and what goes through it and past it: every wait for another worker ends when that worker is gone."""
