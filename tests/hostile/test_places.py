"""Places that are not made for it: the library works there, or says what and how in one line."""

from __future__ import annotations

import pytest

from tests.cases.lanes import at_night
from tests.cases.places import PLACES, run, why_not

NOT_HERE = why_not()
# One for each way that rows take, and for each reason that a rank gives.
OWN = {"two users", "two containers", "not to be looked into", "no /proc", "no memfd", "no pidfd"}
OWN |= {"a mock of Windows"}


@pytest.mark.timeout(250)
@pytest.mark.skipif(NOT_HERE is not None, reason=str(NOT_HERE))
@pytest.mark.parametrize("name", at_night(PLACES, gate=OWN))
def test_ranks(name: str) -> None:
    place = PLACES[name]
    ends = run(place)
    assert [end != 0 for *_, end in ends] == [place.fails] * place.num_ranks, ends
    lines = [line for _, said, _ in ends for line in said.splitlines()]
    if place.said:
        assert any(all(words in line for words in place.said) for line in lines), lines
    if not place.fails:
        assert not any("Traceback" in line for line in lines), lines
        for rank, (printed, *_) in enumerate(ends):
            assert printed == f"<tokenyard.Buffer rank {rank} of 2 on {place.way}>\n"
