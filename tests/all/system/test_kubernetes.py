"""The manifests of deploy/kubernetes: rendered by kubectl, valid, and in agreement with the server."""

import copy
import functools
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.servers import REPOSITORY
from tests.all.system.packages import need
from titopool.settings.config import ENV_PREFIX, SETTINGS
from titopool.settings.sources import from_command_line, parse_value

kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="needs kubernetes-validate: make tools"
)

FOLDER = REPOSITORY / "deploy" / "kubernetes"
OVERLAYS = ("cpu", "gpu", "autoscale", "kuberay")
# The oldest and the newest of today's supported releases; the manifests need 1.23.
VERSIONS = ("1.32", "1.34")
Object = dict[str, Any]
# Made by hand, as docs/kubernetes.md says.
SECRET_KEYS = {"api-key", "admin-key", "curve-key"}


@functools.cache
def rendered(overlay: str) -> list[Object]:
    need("kubectl")
    done = subprocess.run(
        ["kubectl", "kustomize", str(FOLDER / overlay)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def pod_templates(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """Every pod template, with the kind and name of what has it."""
    for one in objects:
        name = f"{one['kind']} {one['metadata']['name']}"
        spec = one.get("spec", {})
        groups = [spec, spec.get("headGroupSpec", {}), *spec.get("workerGroupSpecs", [])]
        for group in groups:
            if "template" in group:
                yield name, group["template"]


def containers(objects: list[Object]) -> Iterator[Object]:
    for _, template in pod_templates(objects):
        yield from template["spec"]["containers"]


# ---- what the API's schemas say ------------------------------------------------------


def check_schemas(objects: list[Object], version: str) -> None:
    for one in objects:
        if one["apiVersion"].startswith("ray.io/"):
            # Its schema is KubeRay's; the pods in it are the API's.
            for _, template in pod_templates([one]):
                pod = {"apiVersion": "v1", "kind": "Pod", "spec": template["spec"]}
                kubernetes_validate.validate(pod, version, strict=True)
        else:
            kubernetes_validate.validate(one, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_is_valid(overlay: str, version: str):
    check_schemas(rendered(overlay), version)


# ---- what the server needs -----------------------------------------------------------


def check_settings(objects: list[Object]) -> None:
    """Each variable is a setting with a value of its type; each command line is accepted."""
    values = {}
    for one in objects:
        if one["kind"] == "ConfigMap":
            values |= one["data"]
    for container in containers(objects):
        own = {one["name"]: one.get("value") for one in container.get("env", ())}
        for variable, value in {**values, **own}.items():
            if variable.startswith(ENV_PREFIX):
                name = variable.removeprefix(ENV_PREFIX).lower()
                assert name in SETTINGS, f"{variable} is no setting"
                if value is not None:
                    parse_value(name, value, variable)
        words = [*container.get("command", ()), *container.get("args", ())]
        if "workers" in words:
            own_options = ("--endpoint=", "--worker-id=", "--ready-file=")
            rest = words[words.index("workers") + 1 :]
            from_command_line([one for one in rest if not one.startswith(own_options)], {})
        for line in "\n".join(words).splitlines():
            if line.startswith("exec titopool serve"):
                environ = {ENV_PREFIX + "CURVE_KEY_FILE": "key"}
                from_command_line(shlex.split(line.replace('"$NUM_WORKERS"', "1"))[3:], environ)


def check_references(objects: list[Object]) -> None:
    """Selectors, ports, settings and secrets that are named exist."""
    names = {(one["kind"], one["metadata"]["name"]) for one in objects}
    templates = dict(pod_templates([one for one in objects if one["kind"] != "RayCluster"]))
    for one in objects:
        if one["kind"] in ("Service", "PodDisruptionBudget"):
            wanted = one["spec"]["selector"]
            wanted = wanted.get("matchLabels", wanted)
            chosen = [
                template
                for template in templates.values()
                if wanted.items() <= template["metadata"]["labels"].items()
            ]
            assert len(chosen) == 1, f"{one['metadata']['name']}: {wanted}"
            ports = {port["name"]: port for port in chosen[0]["spec"]["containers"][0]["ports"]}
            for port in one["spec"].get("ports", ()):
                assert ports[port["targetPort"]]["containerPort"] == port["port"]
        if one["kind"] in ("Deployment", "StatefulSet"):
            labels = one["spec"]["template"]["metadata"]["labels"]
            assert one["spec"]["selector"]["matchLabels"].items() <= labels.items()
        if one["kind"] == "HorizontalPodAutoscaler":
            target = one["spec"]["scaleTargetRef"]
            assert (target["kind"], target["name"]) in names
    for container in containers(objects):
        for source in container.get("envFrom", ()):
            assert ("ConfigMap", source["configMapRef"]["name"]) in names
        for variable in container.get("env", ()):
            reference = variable.get("valueFrom", {}).get("secretKeyRef")
            assert not reference or reference["key"] in SECRET_KEYS
            if variable["name"] == "TITOPOOL_ENDPOINTS" and variable["value"]:
                host, _, port = variable["value"].removeprefix("tcp://").partition(":")
                (service,) = (
                    one
                    for one in objects
                    if one["kind"] == "Service" and one["metadata"]["name"] == host
                )
                assert service["spec"]["clusterIP"] == "None"
                assert service["spec"]["ports"][0]["port"] == int(port)
    for _, template in pod_templates(objects):
        volumes = {volume["name"] for volume in template["spec"].get("volumes", ())}
        for container in template["spec"]["containers"]:
            mounts = {mount["name"] for mount in container.get("volumeMounts", ())}
            assert mounts <= volumes


def check_drain(objects: list[Object]) -> None:
    """A pod has more time than its preStop and its drain take."""
    (settings,) = (one["data"] for one in objects if one["kind"] == "ConfigMap")
    drain_s = float(settings["TITOPOOL_DRAIN_TIMEOUT_S"])
    for name, template in pod_templates(objects):
        if (
            name.startswith("RayCluster")
            and "terminationGracePeriodSeconds" not in template["spec"]
        ):
            # The head runs no worker.
            continue
        stops = [one.get("lifecycle", {}) for one in template["spec"]["containers"]]
        sleeps = [float(one["preStop"]["exec"]["command"][1]) for one in stops if one]
        # Ending takes 3 s of gunicorn and 4 s of the engine at most.
        needed = drain_s + sum(sleeps) + 10
        assert template["spec"]["terminationGracePeriodSeconds"] >= needed, name


CHECKS: tuple[Callable[[list[Object]], None], ...] = (
    check_settings,
    check_references,
    check_drain,
    functools.partial(check_schemas, version=VERSIONS[-1]),
)


@pytest.mark.parametrize("check", CHECKS[:3])
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_manifests_agree_with_the_server(overlay: str, check: Callable[[list[Object]], None]):
    check(rendered(overlay))


# ---- the checks find faults ----------------------------------------------------------


def of_kind(objects: list[Object], kind: str) -> Object:
    return next(one for one in objects if one["kind"] == kind)


def pod_of(objects: list[Object], kind: str) -> Object:
    spec: Object = of_kind(objects, kind)["spec"]["template"]["spec"]
    return spec


def check_all(objects: list[Object]) -> None:
    for check in CHECKS:
        check(objects)


BROKEN: dict[str, Callable[[list[Object]], object]] = {
    "a setting that does not exist": lambda objects: of_kind(objects, "ConfigMap")["data"].update(
        TITOPOOL_MODLE="x"
    ),
    "a value of another type": lambda objects: of_kind(objects, "ConfigMap")["data"].update(
        TITOPOOL_TENSOR_PARALLEL_SIZE="two"
    ),
    "an option that does not exist": lambda objects: pod_of(objects, "StatefulSet")["containers"][
        0
    ]["args"].append("--max-modle-len=8"),
    "a selector without pods": lambda objects: of_kind(objects, "PodDisruptionBudget")["spec"][
        "selector"
    ]["matchLabels"].update({"app.kubernetes.io/component": "none"}),
    "another port": lambda objects: of_kind(objects, "Service")["spec"]["ports"][0].update(port=1),
    "too little time to drain": lambda objects: pod_of(objects, "Deployment").update(
        terminationGracePeriodSeconds=30
    ),
    "a field that does not exist": lambda objects: pod_of(objects, "Deployment").update(
        enableServiceLink=False
    ),
    "settings that do not exist": lambda objects: pod_of(objects, "Deployment")["containers"][0][
        "envFrom"
    ][0]["configMapRef"].update(name="other"),
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN.keys())
def test_a_fault_is_found(change: Callable[[list[Object]], object]):
    objects = copy.deepcopy(rendered("gpu"))
    check_all(objects)
    change(objects)
    with pytest.raises(Exception):  # noqa: B017, PT011
        check_all(objects)


def test_the_autoscaler_s_metric_is_the_rule_s():
    rules = yaml.safe_load((FOLDER / "autoscale" / "prometheus-adapter.yaml").read_text())
    (rule,) = rules["rules"]["external"]
    metric = of_kind(rendered("autoscale"), "HorizontalPodAutoscaler")["spec"]["metrics"][0]
    assert metric["external"]["metric"]["name"] == rule["name"]["as"]
    source = Path(REPOSITORY / "app/operators/metrics/pool_totals.py").read_text()
    for name in ("titopool_worker_sequences", "titopool_waiting_prompts"):
        assert name in rule["metricsQuery"]
        assert f'"{name}"' in source
