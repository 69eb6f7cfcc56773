"""docker-compose.yml passes on every setting; needs no Docker engine."""

import yaml

from harness.servers import REPOSITORY
from titopool.settings.config import ENV_PREFIX, SETTINGS
from titopool.settings.files import CONFIG_VARIABLE

# Set by the image, or meaningless where each worker is a container.
NOT_PASSED_ON = {
    "host", "port", "num_workers", "max_workers", "scale_up_after_s", "scale_down_after_s",
    "run_dir", "cluster", "worker_port", "worker_command",
}  # fmt: skip


def test_every_setting_reaches_the_front_end() -> None:
    services = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())["services"]
    wanted = {ENV_PREFIX + name.upper() for name in SETTINGS.keys() - NOT_PASSED_ON}
    wanted.add(CONFIG_VARIABLE)
    for service in ("front", "front-cpu"):
        given = {name for name in services[service]["environment"] if name.startswith(ENV_PREFIX)}
        assert given == wanted
    for service in ("worker", "worker-cpu"):
        # Workers need no client keys: only front ends check them.
        secrets = {name for name, item in SETTINGS.items() if item.metadata["secret"]}
        given = services[service]["environment"].keys()
        assert not given & {ENV_PREFIX + name.upper() for name in secrets}


def test_no_setting_is_passed_on_twice() -> None:
    """Compose refuses a key that occurs twice; PyYAML takes the last one."""
    node = yaml.compose((REPOSITORY / "docker-compose.yml").read_text())
    (settings,) = [value for key, value in node.value if key.value == "x-settings"]
    names = [key.value for key, _ in settings.value]
    assert len(set(names)) == len(names)


def test_front_ends_ask_for_no_limits() -> None:
    """An engine without the right to raise a limit does not start a container that asks for more."""
    services = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())["services"]
    assert "ulimits" not in services["front"] | services["front-cpu"]
