"""Which of two nodes is the emptier one, and by how much."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenlake.memory.vacancy import FULL, MAX_RETENTION_VALUE, UNKNOWN_VACANCY, Vacancy

vacancies = st.builds(
    Vacancy,
    st.floats(0, 1),
    st.floats(0, 1e9),
    st.floats(0, MAX_RETENTION_VALUE),
)


@pytest.mark.parametrize(
    ("one", "other", "lead"),
    [
        # The free share first: 5 % of all slots is a clear difference.
        (Vacancy(0.15, 1, 0.9), Vacancy(0.10, 9, 0.1), 1.0),
        (Vacancy(0.125, 1, 0.9), Vacancy(0.10, 9, 0.1), 0.5),
        # Then the retention value of the next victim: a factor of 8 is.
        (Vacancy(0.0, 1, 0.1), Vacancy(0.0, 9, 0.8), 1.0),
        (Vacancy(0.003, 1, 0.1), Vacancy(0.0, 9, 0.8), 1.0),
        (Vacancy(0.0, 1, 0.1), Vacancy(0.0, 9, 0.1 * 8**0.5), 0.5),
        # Then its age: a factor of 1.3 is.
        (Vacancy(0.0, 13, 0.5), Vacancy(0.0, 10, 0.5), 1.0),
        (Vacancy(0.0, 13, 0.5), Vacancy(0.0, 10, 0.505), 1.0),
        (Vacancy(0.0, 13, 0.0), Vacancy(0.0, 10, 0.0), 1.0),
        (Vacancy(0.5, 1, 0.2), Vacancy(0.5, 1, 0.2), 0.0),
        (UNKNOWN_VACANCY, UNKNOWN_VACANCY, 0.0),
    ],
)
def test_the_first_difference_that_counts(one: Vacancy, other: Vacancy, lead: float) -> None:
    """The first of three differences that counts sets the lead."""
    assert one.lead(other) == pytest.approx(lead, rel=1e-6)


@given(vacancies, vacancies)
def test_the_lead_of_one_node_is_the_lag_of_the_other(one: Vacancy, other: Vacancy) -> None:
    assert one.lead(other) == pytest.approx(-other.lead(one))


@given(vacancies)
def test_a_node_that_has_not_reported_is_never_the_emptier_one(one: Vacancy) -> None:
    assert UNKNOWN_VACANCY.lead(Vacancy(one.free_share, one.victim_age_s, min(one.victim_value, 1e8))) <= 0


@given(vacancies)
def test_a_node_with_few_free_slots_is_full(one: Vacancy) -> None:
    assert one.full == (one.free_share < FULL)
    assert Vacancy(0.0, one.victim_age_s, one.victim_value).full
