"""Where the time until the first step goes."""

from __future__ import annotations

from lockstep.driver.start_stages import StageEnds, picture, seconds_by_stage


def test_stages_add_up_to_the_whole_in_the_order_in_which_they_ended() -> None:
    ends = {"data": 15.0, "command": 11.0, "teardown": 99.0, "earlier": 3.0}
    assert seconds_by_stage(10.0, ends, 16.5) == {"command": 1.0, "data": 4.0, "first_step": 1.5}


def test_a_command_that_takes_no_step_has_no_start() -> None:
    assert seconds_by_stage(10.0, {"command": 11.0}, None) == {}
    assert seconds_by_stage(10.0, {"command": 11.0}, 4.0) == {}  # the step of an earlier attempt
    assert picture({}) == "no step was done: there is no start to show"


def test_the_first_report_of_a_stage_counts() -> None:
    ends = StageEnds()
    ends.note("data", 1.0)
    ends.note("data", 2.0)
    assert ends.at == {"data": 1.0}


def test_the_longest_stage_has_the_longest_bar() -> None:
    heading, *lines = picture({"command": 1.0, "data": 4.0, "model": 0.0}).splitlines()
    assert heading.startswith("5.0 s ")
    assert [line.count("█") for line in lines] == [10, 40, 0]
