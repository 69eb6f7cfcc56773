"""Variables that a worker sets before it imports vLLM."""

from workers.environment import prepare_environment


def test_openmp_threads_spin_briefly_on_cpus():
    environ: dict[str, str] = {}
    prepare_environment(environ, on_cpu=True)
    assert (environ["OMP_WAIT_POLICY"], environ["GOMP_SPINCOUNT"]) == ("PASSIVE", "1000")


def test_the_user_s_way_of_waiting_is_kept():
    """libgomp prefers the count to the policy."""
    environ = {"OMP_WAIT_POLICY": "ACTIVE"}
    prepare_environment(environ, on_cpu=True)
    assert environ["OMP_WAIT_POLICY"] == "ACTIVE"
    assert "GOMP_SPINCOUNT" not in environ
