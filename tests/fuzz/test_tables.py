"""The fuzz suite knows every route that takes a body; runs with all other tests."""

from tests.fuzz.bodies import BY_PATH, rules


def test_every_route_that_takes_a_body_is_fuzzed() -> None:
    taking = {path for path, methods in rules().items() if "POST" in methods}
    assert taking == set(BY_PATH), "a route is new or gone: tests/fuzz/bodies.py has them all"
