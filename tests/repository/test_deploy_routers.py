"""Tests the chart's routers in a separate Deployment: configuration, keys, probes, and network policies."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from penstock.config import RouterConfig, parse
from tests.repository.test_deploy_manifests import DIGEST, check, find, serve_config, templates
from tests.support.repository.helm_render import CHART, RenderError, load_yaml, manifests, overlay

SEPARATE: dict[str, Any] = {"routers": {"separate": True}}
CASES: dict[str, dict[str, Any]] = {
    "defaults": SEPARATE,
    "everything": {
        "routers": {"separate": True, "metricsPort": 9000, "autoscaling": {"enabled": True, "maxReplicas": 5}},
        "tls": {"secretName": "front", "clientCa": True},
        "security": {"secretName": "cluster", "tls": {"caSecret": "authority"}},
        "metrics": {"tokenSecret": "scrape", "serviceMonitor": {"enabled": True}},
        "tracing": {"headersSecret": "collector"},
        "tenants": {"acme": {"keys": [DIGEST]}},
        "config": {
            "router": {
                "policy": "least-loaded",
                "limits": {"prompt_tokens": 1000},
                "tracing": {"endpoint": "http://c:4317", "headers_file": "/etc/penstock/tracing/headers"},
            },
            "deployment": {"drain_s": 20},
            "autoscaler": {"slo": {"ttft_s": 2.0}},
        },
    },
    "claim": {**SEPARATE, "model": {"path": "/models/m", "claim": "models"}},
    "download": {**SEPARATE, "model": {"path": "/models/m", "download": {"repo": "org/name", "revision": "0" * 40}}},
    "open": {**SEPARATE, "networkPolicy": {"enabled": False}, "podDisruptionBudget": {"enabled": False}},
}
PODS = {"app.kubernetes.io/instance": "penstock", "app.kubernetes.io/component": "router"}
HEAD = {"ray.io/cluster": "penstock", "ray.io/node-type": "head"}
WORKERS = {"ray.io/cluster": "penstock", "ray.io/node-type": "worker"}


def deployment_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    (deployment,) = find(objects, "Deployment")
    return deployment


def container_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    (container,) = deployment_of(objects)["spec"]["template"]["spec"]["containers"]
    return container


def router_config(objects: list[dict[str, Any]]) -> RouterConfig:
    (text,) = [each["data"]["router.json"] for each in find(objects, "ConfigMap") if "router.json" in each["data"]]
    return parse(RouterConfig, json.loads(text), "router.json")


def policies(objects: list[dict[str, Any]]) -> dict[str, Any]:
    return {each["metadata"]["name"]: each["spec"] for each in find(objects, "NetworkPolicy")}


@pytest.mark.parametrize("case", CASES)
def test_separate_routers_fit_the_schemas(case: str) -> None:
    objects = manifests(CASES[case])
    for each in objects:
        check(each)
    values = overlay(load_yaml((CHART / "values.yaml").read_text()), CASES[case])
    jsonschema.validate(values, json.loads((CHART / "values.schema.json").read_text()))


def test_by_default_the_head_holds_the_routers() -> None:
    objects = manifests()
    assert not find(objects, "Deployment")
    assert [each["metadata"]["name"] for each in find(objects, "Service")] == ["penstock-router"]
    assert serve_config(objects).admin_host == "127.0.0.1"


@pytest.mark.parametrize("case", CASES)
def test_head_and_routers_agree(case: str) -> None:
    objects = manifests(CASES[case])
    serve, router = serve_config(objects), router_config(objects)
    assert (serve.routers, serve.metrics_ports, serve.admin_host) == (0, (), "0.0.0.0")
    assert router.admin == f"penstock-admin.llm.svc:{serve.admin_port}"
    same = ("model", "served_model", "http_port", "grpc_port", "tenants_file", "tls", "security", "drain_s")
    for name in same:
        assert getattr(router, name) == getattr(serve, name), name
    expected = serve.router_config()
    for name in ("slo", "policy", "limits", "metrics_token_file"):
        assert getattr(router, name) == getattr(expected, name), name
    (admin,) = [each for each in find(objects, "Service") if each["metadata"]["name"] == "penstock-admin"]
    assert (admin["spec"]["type"], admin["spec"]["selector"]) == ("ClusterIP", HEAD)
    assert admin["spec"]["publishNotReadyAddresses"], "routers would not find a head whose workers are not ready"
    assert [port["port"] for port in admin["spec"]["ports"]] == [serve.admin_port]
    (public,) = [each for each in find(objects, "Service") if each["metadata"]["name"] == "penstock-router"]
    assert public["spec"]["selector"] == PODS
    (cluster,) = find(objects, "RayCluster")
    head = templates(cluster)[0]["spec"]["containers"][0]
    assert [port["name"] for port in head["ports"]] == ["gcs-server"], "the head has no router"
    assert head["readinessProbe"]["exec"]["command"] == ["penstock-health", "live", f"127.0.0.1:{serve.admin_port}"]


@pytest.mark.parametrize("case", CASES)
def test_a_router_pod_has_minimal_privileges_and_private_keys(case: str) -> None:
    objects = manifests(CASES[case])
    pod, container = deployment_of(objects)["spec"]["template"]["spec"], container_of(objects)
    assert pod["automountServiceAccountToken"] is False
    assert (pod["securityContext"]["runAsNonRoot"], pod["securityContext"]["fsGroup"]) == (True, 1000)
    for each in (container, *pod.get("initContainers", ())):
        assert each["securityContext"]["readOnlyRootFilesystem"] is True
        assert each["securityContext"]["allowPrivilegeEscalation"] is False
        assert each["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    volumes = {each["name"]: each for each in pod["volumes"]}
    mounted = {each["name"] for each in container["volumeMounts"]}
    assert mounted <= set(volumes)
    (cluster,) = find(objects, "RayCluster")
    for each in templates(cluster)[0]["spec"].get("initContainers", ()):
        if each["name"] == "certify":
            assert router_config(objects).admin.partition(":")[0] in each["args"], "its certificate needs that name"
    assert "authority" not in mounted, "its key signs certificates of the deployment"
    for name, volume in volumes.items():
        if "secret" in volume and name != "authority":
            assert volume["secret"]["defaultMode"] == 0o400, name
        if "emptyDir" in volume:
            assert volume["emptyDir"]["sizeLimit"]
    router = router_config(objects)
    tls = [router.tls.cert_file, router.tls.key_file, router.tls.ca_file] if router.tls else []
    paths = [
        router.security.secret_file,
        router.tenants_file,
        router.metrics_token_file,
        router.tracing.headers_file,
        *tls,
    ]
    folders = tuple(each["mountPath"] for each in container["volumeMounts"])
    assert all(path.startswith(folders) for path in paths if path)


@pytest.mark.parametrize("case", CASES)
def test_a_router_pod_is_probed_drained_and_reached_at_its_own_address(case: str) -> None:
    objects = manifests(CASES[case])
    pod, container = deployment_of(objects)["spec"]["template"]["spec"], container_of(objects)
    router = router_config(objects)
    assert container["args"][-2:] == ["--peer-host", "$(PENSTOCK_POD_IP)"]
    (address,) = [each for each in container["env"] if each["name"] == "PENSTOCK_POD_IP"]
    assert address["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {
        "http": router.http_port,
        "grpc": router.grpc_port,
        "metrics": router.metrics_port,
        "peer": router.peer_port,
    }
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/health/live",
        "liveness": "/health/live",
        "readiness": "/health/ready",
    }
    scheme = "HTTPS" if router.tls else "HTTP"
    assert {(probe["port"], probe["scheme"]) for probe in probes.values()} == {("metrics", scheme)}
    pause_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > router.drain_s + pause_s
    assert deployment_of(objects)["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    keys = [each["topologyKey"] for each in pod["topologySpreadConstraints"]]
    assert keys == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]


def test_the_budget_spares_routers_and_the_autoscaler_owns_their_number() -> None:
    objects = manifests(CASES["everything"])
    assert "replicas" not in deployment_of(objects)["spec"]
    (scaler,) = find(objects, "HorizontalPodAutoscaler")
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment_of(objects)["metadata"]["name"]
    assert (scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"]) == (2, 5)
    budgets = {each["metadata"]["name"]: each["spec"] for each in find(manifests(SEPARATE), "PodDisruptionBudget")}
    assert budgets["penstock-router"]["maxUnavailable"] == 1
    assert budgets["penstock-router"]["selector"]["matchLabels"] == PODS
    plain = manifests(SEPARATE)
    assert (deployment_of(plain)["spec"]["replicas"], find(plain, "HorizontalPodAutoscaler")) == (2, [])
    changed = manifests({**SEPARATE, "config": {"router": {"policy": "random"}}})
    annotations = [deployment_of(each)["spec"]["template"]["metadata"]["annotations"] for each in (plain, changed)]
    assert annotations[0] != annotations[1], "pods would keep the old configuration"
    (monitor,) = find(objects, "ServiceMonitor")
    assert [each["targetPort"] for each in monitor["spec"]["endpoints"]] == [9000]


def test_routers_reach_admin_workers_and_each_other_and_callers_reach_only_routers() -> None:
    found = policies(manifests(SEPARATE))
    own = found["penstock-router"]
    assert (own["podSelector"]["matchLabels"], own["policyTypes"]) == (PODS, ["Ingress", "Egress"])
    reached = {
        tuple(rule["to"][0]["podSelector"]["matchLabels"].items()): rule["ports"]
        for rule in own["egress"]
        if "podSelector" in rule["to"][0]
    }
    assert reached == {
        tuple(PODS.items()): [{"protocol": "TCP", "port": 50054}],
        tuple(HEAD.items()): [{"protocol": "TCP", "port": 50052}],
        tuple(WORKERS.items()): [{"protocol": "TCP", "port": 20000, "endPort": 65535}],
    }
    assert len(own["egress"]) == 4, "and the DNS"
    # Each permitted egress has a matching ingress, only for routers.
    for name, labels in (("penstock-router", PODS), ("penstock-admin", HEAD), ("penstock-workers", WORKERS)):
        assert found[name]["podSelector"]["matchLabels"] == labels
        (rule,) = found[name]["ingress"]
        assert [each["podSelector"]["matchLabels"] for each in rule["from"]] == [PODS]
        assert rule["ports"] == reached[tuple(labels.items())]
    callers = found["penstock-callers"]
    assert callers["podSelector"]["matchLabels"] == PODS
    assert [port["port"] for rule in callers["ingress"] for port in rule["ports"]] == [8000, 50051]


def test_a_custom_configuration_excludes_separate_routers() -> None:
    with pytest.raises(RenderError, match=r"routers\.separate .* existingConfigSecret .* leave one of them out"):
        manifests({**SEPARATE, "existingConfigSecret": "mine"})
