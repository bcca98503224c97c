"""Tests that every manifest under deploy/ fits its published schema and agrees with penstock/config and the docs.

tests/support/repository/helm_render.py renders the chart, and so does helm where it is installed.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from cluster.cli.main import make_parser
from cluster.pools.resources import NodeResources, divide_resources, why_unplaced
from penstock.config import ServeConfig, load, parse
from penstock.config.tenants import TenantsFile
from penstock.types import Role
from tests.support.repository import helm_render, helm_schema
from tests.support.repository.helm_render import (
    CHART,
    DEPLOY,
    KUBERAY,
    PLAIN,
    RenderError,
    load_all_yaml,
    load_yaml,
    manifests,
    overlay,
)

ROOT = DEPLOY.parent
SCHEMAS = {
    kind: json.loads((ROOT / "tests" / "support" / "repository" / "schemas" / f"{kind.lower()}.json").read_text())
    for kind in ("RayCluster", "ServiceMonitor", "PrometheusRule")
}
KUBERNETES = "1.31"
GPU = load_yaml((CHART / "values-gpu.yaml").read_text())
DIGEST = "sha256:" + "0" * 64
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "gpu": GPU,
    "download": {
        "model": {"path": "/models/m", "download": {"repo": "org/name", "revision": "0" * 40, "tokenSecret": "hub"}}
    },
    "secured": {
        "tls": {"secretName": "front", "clientCa": True},
        "security": {"secretName": "cluster", "tls": {"caSecret": "authority"}},
        "image": {"digest": DIGEST},
        "metrics": {"tokenSecret": "scrape", "serviceMonitor": {"enabled": True}},
        "tenants": {"acme": {"keys": [DIGEST]}},
        "tracing": {"headersSecret": "collector"},
        "config": {
            "router": {
                "policy": "least-loaded",
                "limits": {"prompt_tokens": 1000},
                "tracing": {"endpoint": "http://c:4317", "headers_file": "/etc/penstock/tracing/headers"},
            }
        },
    },
    "watched": {
        "metrics": {"dashboard": {"enabled": True}, "rules": {"enabled": True, "labels": {"release": "stack"}}}
    },
    "own-secret": {"existingConfigSecret": "mine", "networkPolicy": {"enabled": False}},
    "ranks": {
        "config": {"engine": {"tensor_parallel": 4, "quantization": "fp8"}},
        "pools": {
            "prefill": {
                "numGpus": 1,
                "numCpus": 1,
                "engine": {"tensor_parallel": 2},
                "resources": {"limits": {"nvidia.com/gpu": 2}},
            },
            "decode": {
                "numGpus": 1,
                "numCpus": 0.4,  # per rank
                "engine": {"kv_dtype": "fp8"},
                "resources": {"limits": {"nvidia.com/gpu": "4"}},
            },
        },
    },
    "everything": {
        "ports": {"metrics": [9001, 9002, 9003]},
        "tls": {"secretName": "front"},
        "metrics": {"tokenSecret": "scrape", "serviceMonitor": {"enabled": True}},
        "pools": {
            "prefill": {"spares": 1, "bounds": {"max_replicas": 6}, "maxPods": 7},
            "decode": {"spares": 2, "bounds": {"min_replicas": 2, "max_replicas": 5}, "maxPods": 7},
        },
        "config": {
            "lookaside": True,
            "autoscaler": {"mode": "on", "slo": {"ttft_s": 2.0}},
            "balance": {"gap": 0.2},
            "deployment": {"canary_interval_s": 10, "handover_bytes": 0},
        },
        "autoscaling": {"enabled": True},
        "security": {"tls": {"caSecret": "authority"}},
        "networkPolicy": {"egress": [{"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}]}]},
    },
    "outlives-its-head": {"gcsFaultTolerance": {"redisAddress": "redis.llm:6379", "passwordSecret": "redis"}},
    "no-budgets": {"podDisruptionBudget": {"enabled": False}, "autoscaling": {"enabled": True}},
}
GUIDE = (ROOT / "docs" / "deploy.md").read_text()
CASES["guide"] = load_yaml(re.findall(r"```yaml\n(pools:.*?)```", GUIDE, re.DOTALL)[0])


def check(manifest: dict[str, Any]) -> None:
    """Raises if a published schema refuses the manifest, unknown fields included."""
    if manifest["kind"] not in SCHEMAS:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
        return
    jsonschema.validate(manifest, SCHEMAS[manifest["kind"]])
    for template in templates(manifest) if manifest["kind"] == "RayCluster" else []:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": template["metadata"], "spec": template["spec"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def templates(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the pod templates of the head and of each pool."""
    spec = cluster["spec"]
    return [group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


def find(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in objects if each["kind"] == kind]


def serve_config(objects: list[dict[str, Any]]) -> ServeConfig:
    (secret,) = find(objects, "Secret")
    return parse(ServeConfig, json.loads(secret["stringData"]["serve.json"]), "serve.json")


@pytest.mark.parametrize("case", CASES)
def test_the_chart_fits_the_schemas(case: str) -> None:
    objects = manifests(CASES[case])
    assert find(objects, "RayCluster")
    for each in objects:
        check(each)


@pytest.mark.parametrize("case", CASES)
def test_the_charts_values_fit_their_own_schema(case: str) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = overlay(load_yaml((CHART / "values.yaml").read_text()), CASES[case])
    jsonschema.validate(values, schema)
    with pytest.raises(jsonschema.ValidationError, match="replica"):
        jsonschema.validate(overlay(values, {"pools": {"decode": {"replica": 3}}}), schema)
    with pytest.raises(jsonschema.ValidationError):  # an empty list would admit every caller
        jsonschema.validate(overlay(values, {"networkPolicy": {"callers": []}}), schema)


def test_the_schema_checks_detect_errors() -> None:
    objects = manifests()
    (cluster,), (service,) = find(objects, "RayCluster"), find(objects, "Service")
    service["spec"]["ports"][0]["prot"] = "TCP"
    with pytest.raises(Exception, match="prot"):
        check(service)
    templates(cluster)[1]["spec"]["containers"][0]["livenessprobe"] = {}
    with pytest.raises(Exception, match="livenessprobe"):
        check(cluster)
    cluster["spec"]["workerGroupSpecs"][0]["rayStartParams"]["num-cpus"] = 2
    with pytest.raises(jsonschema.ValidationError, match="2 is not of type 'string'"):
        check(cluster)


@pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not installed")
@pytest.mark.parametrize("case", CASES)
def test_helm_renders_the_same(case: str, tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(json.dumps(CASES[case]))
    command = ["helm", "template", "penstock", str(CHART), "--namespace", "llm", "--values", str(values)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    theirs = [each for each in load_all_yaml(printed) if each]

    def order(each: dict[str, Any]) -> tuple[str, str]:
        return each["kind"], each["metadata"]["name"]

    assert sorted(theirs, key=order) == sorted(manifests(CASES[case]), key=order)


def test_the_renderer_refuses_unknown_constructs() -> None:
    renderer = helm_render.Renderer(CHART, {}, {"Name": "a"}, files={})
    for source, problem in {
        "{{ .Values.nothing }}": "there is no 'nothing'",
        "{{ lookup .Release.Name }}": "no function",
        "{{ .Release.Name | b64enc }}": "no function",
        "{{ .Release }}": "use toJson",
        "{{ if .Release.Name }}": "an `end` is missing",
        "{{ end }}": "without a beginning",
        "{{ range .Values }}{{ end }}": "write `range",
    }.items():
        with pytest.raises(RenderError, match=problem):
            renderer.render_text(source)


@pytest.mark.parametrize("name", PLAIN)
def test_plain_manifests_match_the_chart(name: str) -> None:
    text = (KUBERAY / name).read_text()
    assert text == helm_render.plain(PLAIN[name]), "run `python -m tests.support.repository.helm_render --write`"
    for each in load_all_yaml(text):
        check(each)


@pytest.mark.parametrize("case", [name for name in CASES if name != "own-secret"])
def test_the_deployment_fits_the_pods(case: str) -> None:
    """Each node must offer what its worker requests from Ray, and its pod must have as much."""
    objects = manifests(CASES[case])
    config = serve_config(objects)
    (cluster,) = find(objects, "RayCluster")
    groups = {group["groupName"]: group for group in cluster["spec"]["workerGroupSpecs"]}
    for name, pool in {"prefill": config.prefill_pool, "decode": config.decode_pool}.items():
        group, params = groups[name], groups[name]["rayStartParams"]
        offered = json.loads(json.loads(params["resources"]))  # a shell removes the outer quotes
        num_ranks = config.engine_config(Role(name)).tensor_parallel
        assert offered == {key: amount * num_ranks for key, amount in pool.resources.items()}
        assert pool.num_gpus * num_ranks == float(params["num-gpus"])
        assert pool.num_cpus is not None
        assert pool.num_cpus * num_ranks == float(params["num-cpus"])
        num_pods = pool.replicas + pool.spares
        assert num_pods <= group["maxReplicas"]
        assert pool.highest + pool.spares <= group["maxReplicas"]
        container = group["template"]["spec"]["containers"][0]
        limits = container["resources"]["limits"]
        assert float(params["num-cpus"]) <= float(limits["cpu"])
        assert float(params["num-gpus"]) == float(limits.get("nvidia.com/gpu", 0))
        minimum = num_pods if "autoscaling" not in CASES[case] else 0
        assert (group["replicas"], group["minReplicas"]) == (num_pods, minimum)


@pytest.mark.parametrize("case", [name for name in CASES if name != "own-secret"])
def test_pools_may_grow_to_what_rays_autoscaler_may_add(case: str) -> None:
    objects, most = manifests(CASES[case]), Counter[str]()
    for group in find(objects, "RayCluster")[0]["spec"]["workerGroupSpecs"]:
        node = group["rayStartParams"]
        amounts = {"CPU": node["num-cpus"], "GPU": node["num-gpus"], **json.loads(json.loads(node["resources"]))}
        for name, amount in amounts.items():
            most[name] += group["maxReplicas"] * float(amount)
    autoscales = CASES[case].get("autoscaling", {}).get("enabled", False)
    assert serve_config(objects).grows_to == (most if autoscales else {})


def nodes_of(cluster: dict[str, Any]) -> list[NodeResources]:
    """Returns the resources of a new deployment's pods as Ray counts them."""
    nodes = [NodeResources({"CPU": 0.0, "GPU": 0.0}, {})]  # the head
    for group in cluster["spec"]["workerGroupSpecs"]:
        params = group["rayStartParams"]
        counted = {"CPU": float(params["num-cpus"]), "GPU": float(params["num-gpus"])}
        own = json.loads(json.loads(params["resources"]))
        nodes += [NodeResources({**counted, **own}, group["labels"])] * group["replicas"]
    return nodes


@pytest.mark.parametrize("case", [name for name in CASES if name != "own-secret"])
def test_each_worker_and_each_spare_finds_a_pod_of_its_own(case: str) -> None:
    """Places workers as the controller does, all ranks of a worker on one node, until every pod is taken."""
    objects = manifests(CASES[case])
    config = serve_config(objects)
    free = nodes_of(find(objects, "RayCluster")[0])
    shares = divide_resources(config, num_cores=1.0)
    for role in Role:
        share, num_ranks = shares[role.value], config.engine_config(role).tensor_parallel
        assert share.num_gpus == config.pool(role).num_gpus
        for _ in range(config.pool(role).replicas + config.pool(role).spares):
            waits = [node for node in free if why_unplaced(share, [node], num_ranks).startswith("waits for")]
            assert waits, why_unplaced(share, free, num_ranks)
            free.remove(waits[0])
        too_many = why_unplaced(share, free, num_ranks)
        assert "no node has more than" in too_many, "a pod of the pool is left over"
    assert len(free) == 1


def test_the_configuration_matches_the_values() -> None:
    config = serve_config(manifests(CASES["everything"]))
    assert (config.routers, config.metrics_ports) == (3, (9001, 9002, 9003))
    assert (config.prefill_pool.spares, config.decode_pool.spares) == (1, 2)
    assert (config.decode_pool.lowest, config.decode_pool.highest) == (2, 5)
    assert (config.autoscaler.mode, config.autoscaler.slo.ttft_s, config.balance.gap) == ("on", 2.0, 0.2)
    assert (config.canary_interval_s, config.handover_bytes) == (10.0, 0)
    public = config.worker_config("decode-0", Role.DECODE).lookaside
    assert public is not None
    assert public.port == 50053
    ranks = serve_config(manifests(CASES["ranks"]))
    engines = {role: ranks.engine_config(role) for role in Role}
    assert [engines[role].tensor_parallel for role in (Role.PREFILL, Role.DECODE)] == [2, 4]
    assert [engines[role].quantization for role in Role] == ["fp8", "fp8"]
    assert [engines[role].kv_dtype for role in (Role.PREFILL, Role.DECODE)] == ["auto", "fp8"]


@pytest.mark.parametrize(
    ("over", "problem"),
    [
        ({"bounds": {"min_replicas": 3}}, "decode.bounds.min_replicas is 3, above its replicas, 2"),
        ({"bounds": {"max_replicas": 1}}, "decode.bounds.max_replicas is 1, below its replicas, 2"),
        ({"maxPods": 2, "spares": 1}, "decode.maxPods is 2, and replicas and spares are 3 together"),
        ({"numGpus": 1, "resources": {"limits": {"nvidia.com/gpu": "2"}}}, "has 2 of nvidia.com/gpu.*has 1 ranks"),
        (
            {"numGpus": 1, "engine": {"tensor_parallel": 4}, "resources": {"limits": {"nvidia.com/gpu": "1"}}},
            "has 1 of nvidia.com/gpu; numGpus is 1 and a worker has 4 ranks",
        ),
    ],
)
def test_the_chart_refuses_workers_that_can_never_be_placed(over: dict[str, Any], problem: str) -> None:
    with pytest.raises(RenderError, match=problem):
        manifests({"pools": {"decode": over}})


@pytest.mark.parametrize(
    "over",
    [
        {"pools": {"decode": {"numGpus": 4}}},  # per rank
        {"pools": {"decode": {"engine": {"tensor_parallel": 0}}}},
        {"pools": {"decode": {"engine": {"quantization": "int8"}}}},  # the setting applies to all pools
        {"pools": {"decode": {"bounds": {"min_replicas": 0}}}},
        {"pools": {"prefill": {"engine": {"tensor_paralel": 2}}}},
        {"config": {"engine": {"model": "/other"}}},
        {"config": {"engine": {"kv_dtype": "int4"}}},
        {"config": {"autoscaler": {"mode": "dry"}}},
        {"config": {"balance": {"gaps": 0.1}}},
        {"config": {"router": {"grpc_port": 1}}},
        {"config": {"deployment": {"address": "auto"}}},
        {"tenants": {"acme": {"key": [DIGEST]}}},
        {"ports": {"metrics": []}},
        {"ports": {"metrics": [8001, 8001]}},
    ],
    ids=str,
)
def test_the_values_schema_refuses_invalid_settings(over: dict[str, Any]) -> None:
    schema = json.loads(helm_schema.FILE.read_text())
    values = load_yaml((CHART / "values.yaml").read_text())
    jsonschema.validate(values, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(overlay(values, over), schema)


def test_the_values_schema_knows_every_setting() -> None:
    assert helm_schema.FILE.read_text() == helm_schema.whole(), (
        "run `python -m tests.support.repository.helm_schema --write`"
    )


@pytest.mark.parametrize("case", CASES)
def test_only_the_routers_ports_are_open(case: str) -> None:
    objects = manifests(CASES[case])
    (service,), (cluster,) = find(objects, "Service"), find(objects, "RayCluster")
    default = ServeConfig(model="m")
    public = {default.http_port, default.grpc_port}
    assert {port["port"] for port in service["spec"]["ports"]} == public
    assert cluster["spec"]["headGroupSpec"]["serviceType"] == "ClusterIP"
    assert cluster["spec"]["authOptions"] == {"mode": "token"}
    if CASES[case].get("networkPolicy", {}).get("enabled") is False:
        return
    aside = CASES[case].get("config", {}).get("lookaside", False)
    policies = [each for each in find(objects, "NetworkPolicy") if "Ingress" in each["spec"]["policyTypes"]]
    monitored = CASES[case].get("metrics", {}).get("serviceMonitor", {}).get("enabled", False)
    assert [each["metadata"]["name"].removeprefix("penstock-") for each in policies] == [
        "internal", "callers", *["worker-metrics"] * monitored, *["lookaside"] * aside
    ]  # fmt: skip
    if monitored:
        (rule,) = policies.pop(2)["spec"]["ingress"]
        assert "namespaceSelector" in rule["from"][0]
        [ports] = rule["ports"]
        worker = serve_config(objects).worker_config("decode-0", Role.DECODE)
        assert (ports["port"], ports["endPort"]) == (worker.metrics_port, worker.last_metrics_port)
    if aside:  # one port of the workers and no other
        (rule,) = policies.pop()["spec"]["ingress"]
        lookaside = serve_config(objects).worker_config("decode-0", Role.DECODE).lookaside
        assert lookaside is not None
        assert [port["port"] for port in rule["ports"]] == [lookaside.port]
        assert rule["from"]
    for policy in policies:
        for rule in policy["spec"]["ingress"]:
            assert rule["from"], "an empty list admits every caller"
            if "ports" in rule:
                to_prometheus = "namespaceSelector" in rule["from"][0]
                opened = set(serve_config(objects).metrics_ports) if to_prometheus else public
                assert {port["port"] for port in rule["ports"]} == opened
            else:
                (peer,) = rule["from"]
                assert peer["podSelector"] == policy["spec"]["podSelector"]
    internal = find(objects, "NetworkPolicy")[0]["spec"]["podSelector"]["matchLabels"]
    assert internal == {"ray.io/cluster": cluster["metadata"]["name"]}


@pytest.mark.parametrize("case", CASES)
def test_pods_call_only_each_other_the_dns_and_configured_addresses(case: str) -> None:
    over = CASES[case]
    policies = {each["metadata"]["name"]: each["spec"] for each in find(manifests(over), "NetworkPolicy")}
    if over.get("networkPolicy", {}).get("enabled") is False:
        return
    internal = policies["penstock-internal"]
    assert internal["policyTypes"] == ["Ingress", "Egress"], "without Egress all of it is allowed"
    own, dns, *web = internal["egress"]
    assert own == {"to": [{"podSelector": internal["podSelector"]}]}
    assert [each["port"] for each in dns["ports"]] == [53, 53]
    assert all("kube-system" in json.dumps(peer) for peer in dns["to"])
    assert bool(web) is bool(over.get("model", {}).get("download", {}).get("repo")), "nothing else is downloaded"
    assert all([port["port"] for port in rule["ports"]] == [443] for rule in web)
    egress = {name for name, spec in policies.items() if "Egress" in spec["policyTypes"]} - {"penstock-internal"}
    autoscales = over.get("autoscaling", {}).get("enabled", False)
    named = over.get("networkPolicy", {}).get("egress", [])
    assert egress == ({"penstock-api-server"} if autoscales else set()) | ({"penstock-egress"} if named else set())
    if autoscales:
        assert policies["penstock-api-server"]["podSelector"]["matchLabels"]["ray.io/node-type"] == "head"
    if named:
        assert policies["penstock-egress"]["egress"] == named


@pytest.mark.parametrize("case", CASES)
def test_every_writable_volume_has_a_size_limit(case: str) -> None:
    (cluster,) = find(manifests(CASES[case]), "RayCluster")
    for template in templates(cluster):
        sized = {volume["name"]: volume["emptyDir"] for volume in template["spec"]["volumes"] if "emptyDir" in volume}
        assert {"tmp", "home"} <= set(sized)
        assert all(volume.get("sizeLimit") for volume in sized.values()), sized


@pytest.mark.parametrize("case", CASES)
def test_every_pod_mounts_the_secret_and_certificates_but_never_the_authoritys_key(case: str) -> None:
    """Paths of the configuration exist in every pod. The authority's key is only in init containers."""
    objects = manifests(CASES[case])
    (cluster,) = find(objects, "RayCluster")
    authority = CASES[case].get("security", {}).get("tls", {}).get("caSecret")
    if case != "own-secret":
        security = serve_config(objects).security
        assert security.secret_file == "/etc/penstock/secret/secret"
        assert (security.tls is not None) is bool(authority)
    sidecar = cluster["spec"].get("autoscalerOptions")
    for template in templates(cluster):
        (container,) = template["spec"]["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert "/etc/penstock/secret" in mounts
        assert "authority" not in mounts.values()
        environment = {each["name"]: each.get("value", "") for each in container["env"]}
        assert (environment.get("RAY_USE_TLS") == "1") is bool(authority)
        if not authority:
            continue
        certify = template["spec"]["initContainers"][0]
        made = certify["command"][2]
        assert certify["command"][0] == "penstock-certify"
        assert {mount["name"] for mount in certify["volumeMounts"]} >= {"authority", "pod-tls"}
        assert security.tls is not None
        used = [security.tls.ca_file, security.tls.cert_file, security.tls.key_file]
        rays = [environment[f"RAY_TLS_{name}"] for name in ("CA_CERT", "SERVER_CERT", "SERVER_KEY")]
        assert used == rays == [f"{made}/{name}" for name in ("ca.crt", "tls.crt", "tls.key")]
        assert made in mounts
        if sidecar is not None:
            assert "pod-tls" in [mount["name"] for mount in sidecar["volumeMounts"]]
            assert {each["name"] for each in sidecar["env"]} >= {"RAY_USE_TLS"}


def test_an_image_is_referenced_by_its_digest_if_there_is_one() -> None:
    for case, image in (("defaults", "penstock:0.1.0"), ("secured", f"penstock@{DIGEST}")):
        (cluster,) = find(manifests(CASES[case]), "RayCluster")
        for template in templates(cluster):
            for container in [*template["spec"]["containers"], *template["spec"].get("initContainers", [])]:
                assert container["image"] == image


def test_tenants_are_read_from_a_file_that_may_change() -> None:
    objects = manifests(CASES["secured"])
    (secret,) = find(objects, "Secret")
    config = serve_config(objects)
    assert not config.tenants
    folder, name = str(Path(config.tenants_file).parent), Path(config.tenants_file).name
    assert parse(TenantsFile, json.loads(secret["stringData"][name])).tenants["acme"].keys == (DIGEST,)
    head = templates(find(objects, "RayCluster")[0])[0]["spec"]["containers"][0]
    (mount,) = [mount for mount in head["volumeMounts"] if mount["mountPath"] == folder]
    assert "subPath" not in mount, "a mounted file is never updated under a subPath"


@pytest.mark.parametrize("case", CASES)
def test_pods_have_minimal_privileges(case: str) -> None:
    (cluster,) = find(manifests(CASES[case]), "RayCluster")
    for template in templates(cluster):
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is (
            template is templates(cluster)[0] and bool(cluster["spec"].get("enableInTreeAutoscaling"))
        )
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"]["drop"] == ["ALL"]
            assert set(context["capabilities"].get("add", [])) <= {"IPC_LOCK"}
            assert container["resources"]["limits"]["memory"]
        for volume in pod["volumes"]:
            assert "hostPath" not in volume
            if "secret" in volume:  # penstock.rpc.secret refuses files that others may read
                assert volume["secret"]["defaultMode"] & 0o007 == 0
        known = {volume["name"] for volume in pod["volumes"]}
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= known


def test_secrets_reach_the_configuration() -> None:
    objects = manifests(CASES["secured"])
    config = serve_config(objects)
    (cluster,), (monitor,) = find(objects, "RayCluster"), find(objects, "ServiceMonitor")
    head = templates(cluster)[0]["spec"]["containers"][0]
    folders = [mount["mountPath"] for mount in head["volumeMounts"]]
    assert config.tls is not None
    router = config.router_config()
    for file in (
        config.tls.cert_file,
        config.tls.key_file,
        config.tls.ca_file,
        config.security.secret_file,
        router.metrics_token_file,
        router.tracing.headers_file,
    ):
        assert str(Path(file).parent) in folders, file
    assert router.policy == "least-loaded"
    assert head["readinessProbe"]["exec"]["command"][2:] == [
        f"https://127.0.0.1:{port}/health" for port in config.metrics_ports
    ], "the ports that ask for no client certificate: a probe has none"
    endpoint, _ = monitor["spec"]["endpoints"]
    assert (endpoint["scheme"], endpoint["authorization"]["credentials"]["name"]) == ("https", "scrape")


@pytest.mark.parametrize("case", CASES)
def test_every_probe_asks_the_process_that_it_is_for(case: str) -> None:
    """An open port proves nothing, because the system accepts connections for a frozen process."""
    objects = manifests(CASES[case])
    head, *pools = [each["spec"]["containers"][0] for each in templates(find(objects, "RayCluster")[0])]
    probes = {name: head[name]["exec"]["command"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert probes["startupProbe"] == probes["livenessProbe"] == ["penstock-health", "live", "127.0.0.1:6379"]
    assert probes["readinessProbe"][:2] == ["penstock-health", "ready"]
    if case != "own-secret":
        asked = [int(url.rpartition(":")[2].partition("/")[0]) for url in probes["readinessProbe"][2:]]
        assert tuple(asked) == serve_config(objects).metrics_ports
    for pool in pools:
        environment = {each["name"]: each["value"] for each in pool["env"]}
        assert pool["livenessProbe"]["exec"]["command"] == ["penstock-health", "live", "127.0.0.1:6380"]
        folder = environment["PENSTOCK_READY_DIR"]
        assert pool["readinessProbe"]["exec"]["command"] == ["penstock-health", "worker", folder]


def test_each_router_is_scraped_and_workers_called_by_clients_have_the_certificate() -> None:
    objects = manifests(CASES["everything"])
    (cluster,), (monitor,) = (find(objects, kind) for kind in ("RayCluster", "ServiceMonitor"))
    config = serve_config(objects)
    scraped = [each["targetPort"] for each in monitor["spec"]["endpoints"]]
    assert scraped == [config.router_config(number=number).metrics_port for number in range(config.routers)]
    head = templates(cluster)[0]["spec"]["containers"][0]
    assert set(scraped) < {each["containerPort"] for each in head["ports"]}
    assert config.tls is not None
    for template in templates(cluster):
        mounts = {mount["mountPath"] for mount in template["spec"]["containers"][0]["volumeMounts"]}
        assert str(Path(config.tls.cert_file).parent) in mounts


def test_rays_state_outlives_the_head_only_with_a_configured_store() -> None:
    (plain,), (kept,) = (find(manifests(CASES[case]), "RayCluster") for case in ("defaults", "outlives-its-head"))
    assert "gcsFaultToleranceOptions" not in plain["spec"]
    options = kept["spec"]["gcsFaultToleranceOptions"]
    assert options["redisAddress"] == "redis.llm:6379"
    assert options["redisPassword"]["valueFrom"]["secretKeyRef"] == {"name": "redis", "key": "password"}
    head = (DEPLOY / "docker" / "penstock-head").read_text()
    assert "penstock serve" in head
    assert "--attach" in head, "the new head finds the deployment already there"


def test_disruption_budgets_are_whole_numbers_below_the_pool_sizes() -> None:
    """Without a scale subresource Kubernetes requires whole numbers; a budget of all pods would block every drain."""
    for case in ("defaults", "gpu"):
        objects = manifests(CASES[case])
        config = serve_config(objects)
        replicas = {"prefill": config.prefill_pool.replicas, "decode": config.decode_pool.replicas}
        for budget in find(objects, "PodDisruptionBudget"):
            assert "maxUnavailable" not in budget["spec"]
            group = budget["spec"]["selector"]["matchLabels"].get("ray.io/group")
            assert group is None or budget["spec"]["minAvailable"] < replicas[group]
        assert not find(objects, "HorizontalPodAutoscaler")


@pytest.mark.parametrize("case", CASES)
def test_a_terminating_worker_pod_has_time_to_drain(case: str) -> None:
    (cluster,) = find(manifests(CASES[case]), "RayCluster")
    for template in templates(cluster)[1:]:
        spec = template["spec"]
        (drain_s,) = [
            each["value"] for each in spec["containers"][0]["env"] if each["name"].endswith("DRAIN_TIMEOUT_S")
        ]
        assert spec["containers"][0]["args"][0].endswith('exec $KUBERAY_GEN_RAY_START_CMD"')  # Ray gets the signal
        assert 30 <= int(drain_s) <= spec["terminationGracePeriodSeconds"] - 10


def test_versions_match_the_repository() -> None:
    values, chart = (load_yaml((CHART / name).read_text()) for name in ("values.yaml", "Chart.yaml"))
    assert f"ray=={values['rayVersion']}" in (ROOT / "constraints.txt").read_text().splitlines()
    assert f'version = "{chart["appVersion"]}"' in (ROOT / "pyproject.toml").read_text()
    assert values["image"]["tag"] == chart["appVersion"] == chart["version"]
    assert GPU["image"]["tag"] == f"{chart['appVersion']}-cuda"


@pytest.mark.parametrize("path", sorted((DEPLOY / "config").glob("*.toml")), ids=lambda path: path.name)
def test_example_configurations_are_valid(path: Path) -> None:
    config = load(ServeConfig, path)
    assert config.host == "127.0.0.1" or config.address, "public ports without a cluster"


def test_ray_up_fits_rays_schema_and_has_room_for_the_deployment() -> None:
    spec = importlib.util.find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    schema = json.loads((Path(spec.origin).parent / "autoscaler" / "ray-schema.json").read_text())
    config = load(ServeConfig, DEPLOY / "config" / "cluster.toml")
    for path in (DEPLOY / "ray").glob("*.yaml"):
        cluster = load_yaml(path.read_text())
        jsonschema.validate(cluster, schema)
        nodes = cluster["available_node_types"]
        assert cluster["head_node_type"] in nodes
        assert nodes["head"]["resources"] == {"CPU": 0, "GPU": 0}
        for name, pool in {"prefill": config.prefill_pool, "decode": config.decode_pool}.items():
            node = nodes[name]
            wanted = {"CPU": pool.num_cpus, "GPU": pool.num_gpus, **pool.resources}
            room = min(node["resources"][key] // amount for key, amount in wanted.items() if amount)
            assert room * node["max_workers"] >= pool.replicas
            others = [other for other in nodes if other != name]
            assert not any(set(pool.resources) & set(nodes[other]["resources"]) for other in others)
        assert cluster["max_workers"] >= sum(node.get("max_workers", 0) for node in nodes.values())
        text = path.read_text()
        assert "RAY_AUTH_MODE=token" in text
        assert "/home/ubuntu/.ray/auth_token" in cluster["file_mounts"]
        config_path = (ROOT / "deploy" / "config" / "cluster.toml").relative_to(ROOT)
        assert f"penstock/{config_path}" in text


def test_commands_in_the_guides_parse() -> None:
    parser = make_parser()
    texts = [GUIDE, *(path.read_text() for path in (DEPLOY / "ray").iterdir())]
    commands = re.findall(
        r"(?:^|[ '`/])penstock ((?:serve|status|stop|drain|key|generate)\b[^'`#\n]*)", "\n".join(texts)
    )
    assert len(commands) >= 10
    for command in commands:
        parser.parse_args(command.split())  # exits if the command is invalid


def test_the_workflow_runs_the_ci_script_with_read_permission_only() -> None:
    workflow = load_yaml((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert ".ci/run" in [step.get("run") for step in steps]
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())
    assert all(re.search(r"@v\d+$|@[0-9a-f]{40}$", step["uses"]) for step in steps if "uses" in step)
