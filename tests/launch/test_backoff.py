"""How long the supervisor waits before a restart."""

from headrace.launch.supervisor import HEALTHY_SECONDS, Backoff


def test_the_first_death_is_answered_at_once_and_repeated_ones_slower_up_to_a_bound():
    backoff = Backoff()
    delays = [backoff.next_delay_seconds(1.0) for _ in range(10)]
    assert delays == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_a_long_life_starts_the_back_off_anew():
    backoff = Backoff()
    for _ in range(5):
        backoff.next_delay_seconds(0.1)
    assert backoff.next_delay_seconds(HEALTHY_SECONDS) == 0.0
