"""Manifests of `deploy/kubernetes` hang together, and what they start takes its flags, settings, ports and probes.

No cluster runs here. kustomize builds them where `kubectl` is installed; vLLM's own parser reads vLLM's flags in
`tests/integration/vllm/contract/test_manifests.py`.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from urllib.parse import urlsplit

import pytest
import yaml
from tests.deploy.test_deploy import DEPLOY, GRACE_S, PROJECT, image_variables, instructions
from tests.docs.test_snippets import check_connector
from tests.unit.router.fake_workers import Worker, routed

from kvgraft.cli import build_parser
from kvgraft.config import VLLMConfig
from kvgraft.memory.store.registry import require_stores
from kvgraft.router import parse_worker

FOLDER = DEPLOY / "kubernetes"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
OBJECTS = [one for name in KUSTOMIZATION["resources"] for one in yaml.safe_load_all((FOLDER / name).read_text())]
WORKLOADS = [one for one in OBJECTS if one["kind"] in ("Deployment", "StatefulSet")]
SERVICES = [one for one in OBJECTS if one["kind"] == "Service"]
POLICIES = [one for one in OBJECTS if one["kind"] == "NetworkPolicy"]
GIB = 1 << 30


def name_of(one):
    return one["metadata"]["name"]


def named(objects, name):
    (found,) = [one for one in objects if name_of(one) == name]
    return found


def labels_of(workload):
    return workload["spec"]["template"]["metadata"]["labels"]


def pod_of(name):
    return named(WORKLOADS, name)["spec"]["template"]["spec"]


def container_of(name):
    (container,) = pod_of(name)["containers"]
    return container


def ports_of(container):
    return {port["name"]: port["containerPort"] for port in container["ports"]}


def selected(selector):
    """The workloads whose pods a selector means."""
    return [one for one in WORKLOADS if selector.items() <= labels_of(one).items()]


def settings():
    """What the ConfigMap holds, by the rules of kustomize's env files."""
    (generator,) = KUSTOMIZATION["configMapGenerator"]
    lines = [line for name in generator["envs"] for line in (FOLDER / name).read_text().splitlines()]
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def words_of(name):
    """What a container starts, with variables in their places as the kubelet puts them there."""
    container = container_of(name)
    assert container["envFrom"] == [{"configMapRef": {"name": "settings"}}]
    words = container.get("command", []) + container["args"]
    return [re.sub(r"\$\((\w+)\)", lambda found: settings()[found[1]], word) for word in words]


def flags_of(name):
    """Flags of a container that stand once, with their values."""
    words = [word.partition("=") for word in words_of(name) if word.startswith("--")]
    return {flag: value for flag, _, value in words}


def size(text):
    number, unit = re.fullmatch(r"(\d+)([MG]i)", text).groups()
    return int(number) << {"Mi": 20, "Gi": 30}[unit]


def memory_limit(name):
    return size(container_of(name)["resources"]["limits"]["memory"])


def extra_config():
    return json.loads(settings()["KV_TRANSFER_CONFIG"])["kv_connector_extra_config"]


each_workload = pytest.mark.parametrize("name", [name_of(one) for one in WORKLOADS])


class TestObjects:
    def test_all_files_are_applied(self):
        files = {path.name for path in FOLDER.iterdir()} - {"kustomization.yaml"}
        assert files == {*KUSTOMIZATION["resources"], *KUSTOMIZATION["configMapGenerator"][0]["envs"]}

    def test_there_is_the_namespace_and_no_other(self):
        (namespace,) = [one for one in OBJECTS if one["kind"] == "Namespace"]
        assert name_of(namespace) == KUSTOMIZATION["namespace"]
        assert not [one for one in OBJECTS if "namespace" in one["metadata"]]

    def test_no_secrets_are_in_files(self):
        assert not [one for one in OBJECTS if one["kind"] == "Secret"]
        entries = [entry for one in WORKLOADS for entry in container_of(name_of(one)).get("env", [])]
        secrets = [entry for entry in entries if re.search("KEY|TOKEN|PASSWORD|SECRET", entry["name"])]
        assert {entry["name"] for entry in secrets} == {"VLLM_API_KEY", "HF_TOKEN"}
        assert all(entry["valueFrom"]["secretKeyRef"]["optional"] for entry in secrets)
        assert not re.search(r"://[^/\s\"]*@|api.key|password", (FOLDER / "settings.env").read_text(), re.IGNORECASE)

    @each_workload
    def test_selectors_mean_their_pods(self, name):
        workload = named(WORKLOADS, name)
        assert selected(workload["spec"]["selector"]["matchLabels"]) == [workload]

    @pytest.mark.parametrize("service", SERVICES, ids=name_of)
    def test_services_mean_pods_of_one_workload_and_ports_that_they_have(self, service):
        (workload,) = selected(service["spec"]["selector"])
        ports = ports_of(container_of(name_of(workload)))
        assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == ports

    def test_the_stateful_set_has_its_headless_service(self):
        service = named(SERVICES, named(WORKLOADS, "vllm")["spec"]["serviceName"])
        assert service["spec"]["clusterIP"] == "None"

    @pytest.mark.parametrize("policy", POLICIES, ids=name_of)
    def test_policies_mean_pods_and_ports_that_there_are(self, policy):
        (workload,) = selected(policy["spec"]["podSelector"]["matchLabels"])
        ports = ports_of(container_of(name_of(workload)))
        for rule in policy["spec"]["ingress"]:
            assert {port["port"] for port in rule["ports"]} <= set(ports)
            assert all(selected(one["podSelector"]["matchLabels"]) for one in rule["from"] if "podSelector" in one)

    def test_text_is_reached_by_those_alone_who_need_it(self):
        """KV events by the router, the store by vLLM."""
        reached = {}
        for policy in POLICIES:
            for rule in policy["spec"]["ingress"]:
                who = [one.get("podSelector", one.get("namespaceSelector"))["matchLabels"] for one in rule["from"]]
                for port in rule["ports"]:
                    reached.setdefault(port["port"], []).extend(who)
        assert reached["kv-events"] == reached["kv-replay"] == [labels_of(named(WORKLOADS, "router"))]
        assert reached["redis"] == [labels_of(named(WORKLOADS, "vllm"))]

    @each_workload
    def test_volumes_resolve(self, name):
        claims = named(WORKLOADS, name)["spec"].get("volumeClaimTemplates", [])
        volumes = [volume["name"] for volume in pod_of(name)["volumes"]] + [name_of(claim) for claim in claims]
        assert sorted(mount["name"] for mount in container_of(name)["volumeMounts"]) == sorted(volumes)

    @each_workload
    def test_probes_ask_ports_that_there_are(self, name):
        container = container_of(name)
        probes = [container[kind] for kind in ("startupProbe", "readinessProbe", "livenessProbe") if kind in container]
        asked = {(probe.get("httpGet") or probe["tcpSocket"])["port"] for probe in probes}
        assert asked <= set(ports_of(container))
        assert {"readinessProbe", "livenessProbe"} <= set(container)

    @each_workload
    def test_pods_have_no_more_rights_than_they_need(self, name):
        pod, rights = pod_of(name), container_of(name)["securityContext"]
        assert pod["automountServiceAccountToken"] is False
        assert (rights["allowPrivilegeEscalation"], rights["capabilities"]) == (False, {"drop": ["ALL"]})

    @each_workload
    def test_no_service_sets_variables(self, name):
        """A service `vllm` would set VLLM_PORT to a URL, and vLLM stop at it."""
        assert pod_of(name)["enableServiceLinks"] is False

    @each_workload
    def test_resources_are_named(self, name):
        resources = container_of(name)["resources"]
        assert {"cpu", "memory"} <= set(resources["requests"])
        assert size(resources["requests"]["memory"]) <= size(resources["limits"]["memory"])

    def test_images_are_those_that_are_built_and_have_versions(self):
        ours = {image["name"]: image["newTag"] for image in KUSTOMIZATION["images"]}
        assert ours == dict.fromkeys(("kvgraft", "kvgraft-vllm"), PROJECT["version"])
        used = {container_of(name_of(one))["image"] for one in WORKLOADS}
        compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
        assert used == {*ours, compose["redis"]["image"]}

    @pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
    def test_kustomize_builds_them(self):
        done = subprocess.run(["kubectl", "kustomize", FOLDER], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        built = list(yaml.safe_load_all(done.stdout))
        assert len(built) == len(OBJECTS) + 1
        (settings_map,) = [one for one in built if one["kind"] == "ConfigMap"]
        assert settings_map["data"] == settings()
        used = set(re.findall(r"configMapRef:\s+name: (\S+)", done.stdout))
        assert used == {name_of(settings_map)}


class TestVLLM:
    def test_settings_are_the_connector_s(self):
        check_connector(json.loads(flags_of("vllm")["--kv-transfer-config"]))

    def test_variables_are_no_settings_of_ours_or_of_vllm(self):
        """Those would be warned of, or refused, where they mean nothing."""
        assert not [name for name in settings() if name.startswith(("KVGRAFT_", "VLLM_"))]
        assert all(f"$({name})" in str(WORKLOADS) for name in settings())

    def test_donors_are_announced_on_ports_that_are_open(self):
        events = json.loads(flags_of("vllm")["--kv-events-config"])
        ports = ports_of(container_of("vllm"))
        assert VLLMConfig.from_dict(extra_config()).announce_donors
        assert events["enable_kv_cache_events"]
        assert events["endpoint"] == f"tcp://*:{ports['kv-events']}"
        assert events["replay_endpoint"] == f"tcp://*:{ports['kv-replay']}"

    def test_listens_where_it_is_asked(self):
        flags = flags_of("vllm")
        assert (flags["--host"], int(flags["--port"])) == ("0.0.0.0", ports_of(container_of("vllm"))["http"])

    def test_the_store_is_the_service_and_its_extra_is_in_the_image(self):
        url = VLLMConfig.from_dict(extra_config()).store
        require_stores(url)
        store = urlsplit(url)
        (port,) = named(SERVICES, store.hostname)["spec"]["ports"]
        assert store.port == port["port"]
        last = max(i for i, (name, text) in enumerate(instructions()) if name == "FROM" and text.endswith(" AS vllm"))
        installs = next(text for name, text in instructions()[last:] if name == "RUN")
        needed = {re.match(r"\w+", one)[0] for one in PROJECT["optional-dependencies"]["redis"]}
        assert needed <= set(installs.split())

    def test_the_model_is_kept_where_there_is_a_volume(self):
        container = container_of("vllm")
        (home,) = [entry["value"] for entry in container["env"] if entry["name"] == "HF_HOME"]
        assert home in {mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "models"}

    def test_memory_holds_the_donors_and_what_is_on_its_way_to_the_store(self):
        assert memory_limit("vllm") >= VLLMConfig.from_dict(extra_config()).host_bytes * 5 / 4 + 8 * GIB


class TestRouter:
    ARGS = build_parser().parse_args(words_of("router")[1:])
    WORKERS = tuple(parse_worker(text) for text in ARGS.worker)

    def test_starts_the_router_where_the_image_has_it(self):
        assert words_of("router")[:2] == ["kvgraft", "router"]
        assert "kvgraft" in PROJECT["scripts"]

    def test_listens_where_it_is_asked(self):
        assert (self.ARGS.host, self.ARGS.port) == ("0.0.0.0", ports_of(container_of("router"))["http"])

    def test_has_the_tokenizer_of_the_model_that_is_served(self):
        assert self.ARGS.model == words_of("vllm")[2]

    def test_each_server_is_a_worker_at_its_own_ports(self):
        vllm = named(WORKLOADS, "vllm")["spec"]
        ports = ports_of(container_of("vllm"))
        pods = [f"vllm-{number}" for number in range(vllm["replicas"])]
        assert [worker.name for worker in self.WORKERS] == pods
        for worker, pod in zip(self.WORKERS, pods, strict=True):
            host = f"{pod}.{vllm['serviceName']}"
            assert worker.url == f"http://{host}:{ports['http']}"
            assert worker.events == f"tcp://{host}:{ports['kv-events']}"
            assert worker.replay == f"tcp://{host}:{ports['kv-replay']}"

    @pytest.mark.parametrize(("healthy", "ready"), [(False, 503), (True, 200)])
    def test_is_ready_with_a_server_and_lives_without_one(self, healthy, ready):
        """A router that is restarted because vLLM loads its model would help nobody."""
        answers = asyncio.run(self.probed(healthy))
        assert answers == {"startupProbe": 200, "readinessProbe": ready, "livenessProbe": 200}

    async def probed(self, healthy):
        """What the router answers to its probes, in front of one server."""
        worker = Worker("vllm-0")
        worker.healthy = healthy
        await worker.start()
        try:
            async with routed(worker) as (session, _):
                container = container_of("router")
                paths = {kind: container[kind]["httpGet"]["path"] for kind in container if kind.endswith("Probe")}
                answers = {}
                for kind, path in paths.items():
                    async with session.get(path) as answer:
                        answers[kind] = answer.status
                return answers
        finally:
            await worker.stop()

    def test_waits_longer_than_the_router(self):
        assert pod_of("router")["terminationGracePeriodSeconds"] >= GRACE_S + 10

    def test_memory_holds_what_it_remembers(self):
        """225 bytes a token at most, prefixes and donors apart (docs/routing.md)."""
        assert memory_limit("router") >= len(self.WORKERS) * 2 * 225 * self.ARGS.max_tokens + GIB // 2

    def test_runs_as_the_user_of_the_image_and_writes_to_volumes(self):
        user = re.search(r"--uid (\d+)", str(instructions()))[1]
        assert pod_of("router")["securityContext"]["runAsUser"] == int(user)
        mounts = [mount["mountPath"] for mount in container_of("router")["volumeMounts"]]
        assert any(image_variables()["HF_HOME"].startswith(folder) for folder in mounts)


def test_redis_is_started_as_compose_starts_it():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["redis"]
    words = container_of("redis")["args"]
    assert words == compose["command"]
    held = words[words.index("--maxmemory") + 1]
    assert memory_limit("redis") > int(held.removesuffix("gb")) * GIB
