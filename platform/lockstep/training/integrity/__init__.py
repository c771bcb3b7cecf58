"""Whether a run computes the right bits: the rehearsal, digests, the SDC check and the agreement of the ranks."""
