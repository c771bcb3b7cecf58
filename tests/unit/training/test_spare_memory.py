"""A second process of the run is started only where there is memory for it."""

from __future__ import annotations

import pytest
import torch

from lockstep.training.integrity.resume_check import spare_memory


def test_room_is_what_this_process_has_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spare_memory.lacking_memory(torch.device("cpu")) == ""
    monkeypatch.setattr(spare_memory, "_of_machine", lambda: 5_000_000)
    assert "of which 5 MB can be had" in spare_memory.lacking_memory(torch.device("cpu"))
