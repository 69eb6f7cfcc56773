"""How many workers are wanted, from loads and what clients ask for."""

from pathlib import Path

from titopool.settings.config import ServerConfig
from titopool.wire.run_dir import write_wanted
from workers.supervisor.phase_pipe import Load
from workers.supervisor.scale import Scale

IDLE, FULL = Load(0, 0, 2), Load(9, 2, 2)


def scale_of(folder: Path, *, least: int, most: int) -> Scale:
    return Scale(
        ServerConfig(
            run_dir=str(folder), num_workers=least, max_workers=most,
            scale_up_after_s=1, scale_down_after_s=1,
        )
    )  # fmt: skip


def test_waiting_prompts_add_workers_up_to_the_most(tmp_path: Path):
    scale = scale_of(tmp_path, least=1, most=4)
    scale.follow([FULL], 0, 0.0)
    assert scale.wanted == 1
    scale.follow([FULL], 0, 1.0)
    # Nine wait, and a worker runs two.
    assert scale.wanted == 4


def test_waiting_prompts_take_no_worker_that_a_client_asked_for(tmp_path: Path):
    scale = scale_of(tmp_path, least=1, most=8)
    write_wanted(str(tmp_path), 10)
    for now in (0.0, 1.0, 2.0):
        scale.follow([FULL] * 10, 0, now)
        assert scale.wanted == 10


def test_idle_workers_leave_one_by_one(tmp_path: Path):
    scale = scale_of(tmp_path, least=2, most=4)
    write_wanted(str(tmp_path), 4)
    scale.follow([IDLE] * 4, 0, 0.0)
    wanted = []
    for now in (1.0, 2.0, 3.0, 4.0, 5.0):
        scale.follow([IDLE] * scale.wanted, 0, now)
        wanted.append(scale.wanted)
    assert wanted == [3, 3, 2, 2, 2]


def test_a_worker_that_the_others_cannot_stand_in_for_stays(tmp_path: Path):
    """Three workers run what would take more than seven tenths of two."""
    scale = scale_of(tmp_path, least=1, most=4)
    write_wanted(str(tmp_path), 3)
    for now in (0.0, 2.0, 4.0):
        scale.follow([Load(0, 5, 10)] * 3, 0, now)
        assert scale.wanted == 3
    for now in (5.0, 7.0):
        scale.follow([Load(0, 4, 10)] * 3, 0, now)
    assert scale.wanted == 2
