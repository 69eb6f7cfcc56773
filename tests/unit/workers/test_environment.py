"""Variables that a worker sets before it imports vLLM."""

import pytest

from workers.environment import prepare_environment


def test_openmp_threads_spin_briefly_on_cpus():
    environ: dict[str, str] = {}
    prepare_environment(environ, on_cpu=True)
    assert (environ["OMP_WAIT_POLICY"], environ["GOMP_SPINCOUNT"]) == ("PASSIVE", "1000")


@pytest.mark.parametrize("own", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "5000"}])
def test_the_user_s_way_of_waiting_is_kept(own: dict[str, str]):
    """libgomp prefers the count to the policy."""
    environ = dict(own)
    prepare_environment(environ, on_cpu=True)
    assert {name: environ[name] for name in own} == own
    assert ("GOMP_SPINCOUNT" in environ) == ("GOMP_SPINCOUNT" in own)
