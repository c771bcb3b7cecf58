"""Views of recorded runs: their curves, written where people look. A view is made from the ledger, and can be made anew at any time."""
