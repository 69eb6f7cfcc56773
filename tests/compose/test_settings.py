"""docker-compose.yml hands on every setting; needs no Docker engine."""

import yaml

from app.http.connections import SPARE, limits_within
from tests.servers import REPOSITORY
from titopool.settings.config import ENV_PREFIX, SETTINGS, ServerConfig

# The image's, or of no meaning where each worker is a container.
NOT_HANDED_ON = {"host", "port", "num_workers", "run_dir"}


def test_every_setting_reaches_the_front_end() -> None:
    services = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())["services"]
    wanted = {ENV_PREFIX + name.upper() for name in SETTINGS.keys() - NOT_HANDED_ON}
    for service in ("front", "front-cpu"):
        given = {name for name in services[service]["environment"] if name.startswith(ENV_PREFIX)}
        assert given == wanted
    for service in ("worker", "worker-cpu"):
        # No client asks a worker, which therefore knows no client's key.
        secrets = {name for name, item in SETTINGS.items() if item.metadata["secret"]}
        given = services[service]["environment"].keys()
        assert not given & {ENV_PREFIX + name.upper() for name in secrets}


def test_front_ends_may_open_as_many_descriptors_as_their_requests_need() -> None:
    services = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())["services"]
    wanted = ServerConfig().max_open_requests
    for service in ("front", "front-cpu"):
        num_descriptors = services[service]["ulimits"]["nofile"]
        limits = limits_within(num_descriptors, max_open_requests=wanted)
        assert limits == (wanted, wanted + SPARE)
