"""Jobs whose final model is not traced for MLflow: that takes longer than a short run, and is shown in test_final_model."""

from __future__ import annotations

from jobs.digits.job import Digits


class UntracedDigits(Digits):
    """jobs.digits without an example input."""

    def example_input(self) -> None:
        return None
