"""Sweeps on Ray Tune: what is tried, on warm workers, decided on results alone, and kept on record."""
