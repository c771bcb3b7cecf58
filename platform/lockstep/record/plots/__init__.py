"""Plots of a run, drawn from its ledger when it ends."""
