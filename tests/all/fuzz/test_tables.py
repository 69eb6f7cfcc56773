"""The fuzz suite covers every route that takes a body; this test runs with the normal suite."""

from tests.all.fuzz.bodies import BY_PATH, rules


def test_every_route_that_takes_a_body_is_fuzzed() -> None:
    post_paths = {path for path, methods in rules().items() if "POST" in methods}
    assert post_paths == set(BY_PATH), (
        "a route is new or gone: tests/all/fuzz/bodies.py has them all"
    )
