from kv_transfer.polling import PollPace
from tests.fakes.clock import FakeClock


def pace_after(quiet_s):
    clock = FakeClock()
    pace = PollPace(idle_s=0.1, clock=clock)
    clock.advance(quiet_s)
    return pace


def test_what_has_just_happened_is_followed_at_once():
    assert pace_after(0.001).delay_s() == 0.0


def test_a_wait_is_a_share_of_the_quiet_before_it():
    assert pace_after(0.004).delay_s() == 0.001
    assert abs(pace_after(0.4).delay_s() - 0.05) < 1e-9


def test_no_wait_is_longer_than_when_idle():
    assert pace_after(1000.0).delay_s() == 0.1


def test_a_stir_begins_anew():
    pace = pace_after(1000.0)
    pace.stir()
    assert pace.delay_s() == 0.0
