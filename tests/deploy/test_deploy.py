"""What `deploy/` says is true of this checkout: files and extras exist, commands and variables are taken, times fit together.

No image is built here. systemd's own check runs where `systemd-analyze` is installed.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from kvgraft.cli import build_parser
from kvgraft.config import ServerConfig, resolve

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GRACE_S = ServerConfig().shutdown_grace_s


def instructions():
    """Instructions of the Dockerfile with their arguments, in order."""
    lines = [line for line in (DEPLOY / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


def arguments(name):
    return [text for instruction, text in instructions() if instruction == name]


def image_variables():
    """`ENV` of the last stage."""
    last = max(i for i, (name, _) in enumerate(instructions()) if name == "FROM")
    found = [text for name, text in instructions()[last:] if name == "ENV"]
    return dict(word.split("=", 1) for text in found for word in shlex.split(text))


def ignored(path):
    """Whether `Dockerfile.dockerignore`, which begins by leaving everything out, keeps a path from the build."""
    kept = re.findall(r"^!(\S+)$", (DEPLOY / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    return not any(path == one or path.startswith(f"{one}/") for one in kept)


def settings_of(command, environ):
    """What `kvgraft` would serve with."""
    args = build_parser().parse_args(command)
    flags = {name: vars(args)[f"setting_{name}"] for name in ServerConfig.rules() if f"setting_{name}" in vars(args)}
    return resolve(ServerConfig, flags, args.config, environ).config


def substituted(word, environ=None):
    """A word of compose.yaml as Compose reads it."""
    known = environ or {}
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: known.get(found[1]) or found[2], word)


def unit():
    """Entries of the systemd unit by section and name."""
    found, section = {}, ""
    for line in (DEPLOY / "kvgraft.service").read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            name, value = line.split("=", 1)
            found.setdefault((section, name), value)
    return found


def example_variables():
    lines = (DEPLOY / "kvgraft.env.example").read_text().splitlines()
    return dict(line.removeprefix("# ").split("=", 1) for line in lines if re.match(r"(# )?KVGRAFT_", line))


class TestDockerfile:
    def test_copies_what_there_is_and_what_is_not_ignored(self):
        copied = [word for text in arguments("COPY") if "--from" not in text for word in text.split()[:-1]]
        assert {"src", "pyproject.toml"} <= set(copied)
        assert not [path for path in copied if not (ROOT / path).exists() or ignored(path)]

    def test_copies_all_that_the_wheel_is_built_of(self):
        """A build from these files alone succeeds: what pyproject names is among them."""
        copied = [word for text in arguments("COPY") if "--from" not in text for word in text.split()[:-1]]
        hook = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"]["custom"]
        assert {"README.md", *PROJECT["license-files"], hook["path"]} <= set(copied)

    def test_installs_extras_that_exist_with_pinned_versions(self):
        installs = [text for text in arguments("RUN") if "pip install" in text]
        assert all("-c constraints.txt" in text for text in installs)
        (extras,) = re.findall(r'"\.\[([\w,]+)\]"', " ".join(installs))
        assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])

    def test_runs_as_nobody_in_particular(self):
        (user,) = arguments("USER")
        assert re.search(rf"useradd .*--uid \d+ .*\b{user}\b", " ".join(arguments("RUN")))

    def test_command_and_variables_are_taken(self):
        command = json.loads(arguments("ENTRYPOINT")[-1]) + json.loads(arguments("CMD")[-1])
        assert command[0] in PROJECT["scripts"]
        variables = {name: value for name, value in image_variables().items() if name.startswith("KVGRAFT_")}
        config = settings_of(command[1:], variables)
        assert (config.host, config.port) == ("0.0.0.0", int(arguments("EXPOSE")[0]))

    def test_health_is_asked_where_the_server_listens(self):
        (check,) = arguments("HEALTHCHECK")
        program = json.loads(check.partition("CMD ")[2])
        assert program[:2] == ["python", "-c"]
        compile(program[2], "healthcheck", "exec")
        assert "/health" in program[2]
        assert "KVGRAFT_PORT" in image_variables()


class TestCompose:
    @pytest.fixture
    def service(self):
        return yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["kvgraft"]

    def test_builds_the_dockerfile_here(self, service):
        assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).samefile(DEPLOY / "Dockerfile")

    def test_command_is_taken_and_its_store_is_a_volume_that_the_user_may_write(self, service):
        command = [substituted(word) for word in service["command"]]
        store = settings_of(command, {}).store
        folder = store.removeprefix("file:").partition("?")[0]
        volumes = {volume.split(":")[1]: volume.split(":")[0] for volume in service["volumes"]}
        assert volumes[folder] in yaml.safe_load((DEPLOY / "compose.yaml").read_text())["volumes"]
        assert f"chown kvgraft {folder}" in " ".join(arguments("RUN"))

    def test_publishes_the_port_to_this_machine_only(self, service):
        assert service["ports"] == [f"127.0.0.1:8000:{image_variables()['KVGRAFT_PORT']}"]

    def test_waits_longer_than_the_server(self, service):
        assert int(service["stop_grace_period"].removesuffix("s")) >= GRACE_S + 10

    def test_what_it_keeps_its_models_in_can_be_written(self, service):
        """The root is read-only: the hub's cache and the store need volumes."""
        assert service["read_only"]
        mounted = [volume.split(":")[1] for volume in service["volumes"] if not volume.endswith(":ro")]
        assert any(image_variables()["HF_HOME"].startswith(folder) for folder in mounted)


class TestObservability:
    """Services that start only when a profile asks for them."""

    COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())

    def service(self, name):
        return self.COMPOSE["services"][name]

    def mounts(self, name):
        """Files and folders of ours by where the container sees them."""
        found = (volume.split(":")[:2] for volume in self.service(name)["volumes"])
        return {inside: DEPLOY / ours for ours, inside in found if ours.startswith("./")}

    def test_the_server_alone_starts_by_default(self):
        profiles = {name: service.get("profiles", []) for name, service in self.COMPOSE["services"].items()}
        assert profiles.pop("kvgraft") == []
        assert profiles == {"prometheus": ["observability"], "grafana": ["observability"], "redis": ["redis"]}

    def test_images_have_versions_and_ports_are_published_to_this_machine_only(self):
        for name in ("prometheus", "grafana", "redis"):
            service = self.service(name)
            assert re.fullmatch(r"[\w/]+:v?\d+(\.\d+)*", service["image"])
            assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))

    def test_volumes_exist(self):
        for service in self.COMPOSE["services"].values():
            for volume in service.get("volumes", []):
                name = volume.split(":")[0]
                # What the operator puts there is not in the repository.
                assert name in self.COMPOSE["volumes"] or (DEPLOY / name).is_dir() or name == "./models"

    def test_prometheus_reads_its_file_and_finds_the_server(self):
        ours = self.mounts("prometheus")
        (file,) = [word.partition("=")[2] for word in self.service("prometheus")["command"] if "config.file" in word]
        folder, _, name = file.rpartition("/")
        config = yaml.safe_load((ours[folder] / name).read_text())
        (job,) = [scrape for scrape in config["scrape_configs"] if "static_configs" in scrape]
        assert job["static_configs"] == [{"targets": [f"kvgraft:{image_variables()['KVGRAFT_PORT']}"]}]
        assert "kvgraft" in self.COMPOSE["services"]

    def test_grafana_finds_its_dashboards_and_prometheus(self):
        ours = self.mounts("grafana")
        provisioning = ours["/etc/grafana/provisioning"]
        (provider,) = yaml.safe_load((provisioning / "dashboards" / "kvgraft.yaml").read_text())["providers"]
        assert {path.name for path in ours[provider["options"]["path"]].iterdir()} == {
            "embedded.json",
            "vllm.json",
            "sglang.json",
        }
        (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
        assert source["url"] == "http://prometheus:9090"
        interval = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())["global"]["scrape_interval"]
        assert source["jsonData"]["timeInterval"] == interval

    def test_grafana_s_first_password_may_be_given(self):
        password = self.service("grafana")["environment"]["GF_SECURITY_ADMIN_PASSWORD"]
        assert (substituted(password), substituted(password, {"GRAFANA_PASSWORD": "x"})) == ("admin", "x")

    def test_the_server_takes_the_store_that_redis_is(self):
        service = self.service("kvgraft")
        told = re.search(r"KVGRAFT_STORE=(\S+)", (DEPLOY / "compose.yaml").read_text())[1]
        command = [substituted(word, {"KVGRAFT_STORE": told}) for word in service["command"]]
        assert settings_of(command, {}).store == told == "redis://redis:6379/0"


class TestSystemd:
    def test_command_is_taken(self):
        command = shlex.split(unit()["Service", "ExecStart"].replace("%S", "/var/lib"))
        assert command[0].endswith("/bin/kvgraft")
        assert settings_of(command[1:], {}).store.startswith("file:/var/lib/kvgraft/")

    def test_waits_longer_than_the_server(self):
        assert int(unit()["Service", "TimeoutStopSec"]) >= GRACE_S + 10

    def test_does_not_try_again_what_cannot_help(self):
        assert unit()["Service", "RestartPreventExitStatus"] == "2"

    @pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
    def test_systemd_has_nothing_to_say(self, tmp_path):
        """The unit itself, with a program that exists in the place of ours."""
        text = (DEPLOY / "kvgraft.service").read_text().replace("/opt/kvgraft/bin/kvgraft", "/bin/true")
        (tmp_path / "kvgraft.service").write_text(text)
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", tmp_path / "kvgraft.service"],
            capture_output=True,
            text=True,
            check=False,
        )
        told = [line for line in (done.stdout + done.stderr).splitlines() if "kvgraft.service" in line]
        assert not told


def test_example_of_variables_is_taken():
    config = resolve(ServerConfig, {}, None, example_variables()).config
    assert config.api_key
    assert config.shutdown_grace_s == GRACE_S
