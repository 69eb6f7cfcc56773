import gc

from titopool.collector import without_collector


def test_the_collector_is_off_until_the_first_of_two_blocks_has_ended():
    first, second = without_collector(), without_collector()
    first.__enter__()
    second.__enter__()
    second.__exit__(None, None, None)
    assert not gc.isenabled()
    first.__exit__(None, None, None)
    assert gc.isenabled()
    with without_collector():
        assert not gc.isenabled()
    assert gc.isenabled()
