"""Groups of workers that change while a run goes on: who belongs to the next one, and how it forms."""
