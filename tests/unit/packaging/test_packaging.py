"""What an index and pip are told of the package. Wheel and sdist themselves are built and tried by `make test-wheel`."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parents[3]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
HOOK = PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["custom"]
ADDRESS = "https://files.example/kvgraft/blob/v1"


@pytest.fixture
def hook(monkeypatch):
    """The build hook, without hatchling, which only builds have."""
    interface = ModuleType("hatchling.metadata.plugin.interface")
    interface.MetadataHookInterface = object
    for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    spec = importlib.util.spec_from_file_location("package_readme", ROOT / HOOK["path"])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def update(hook, files_url):
    metadata = {}
    itself = SimpleNamespace(root=str(ROOT), config={"files-url": files_url})
    hook.PackageReadme.update(itself, metadata)
    return metadata


def targets(text):
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def test_links_become_absolute_where_there_is_an_address(hook):
    metadata = update(hook, ADDRESS + "/")
    found = targets(metadata["readme"]["text"])
    assert f"{ADDRESS}/docs/server.md" in found
    assert f"{ADDRESS}/docs/images/reuse.svg?raw=true" in found
    assert all(target.startswith((ADDRESS, "#", "https://")) for target in found)
    assert metadata["urls"]["Changelog"] == f"{ADDRESS}/CHANGELOG.md"


def test_without_an_address_no_link_and_no_url_leads_nowhere(hook):
    metadata = update(hook, "")
    text = metadata["readme"]["text"]
    assert all(target.startswith(("#", "https://")) for target in targets(text))
    assert "concepts · all pages · server" in text
    assert metadata["urls"] == {}


def test_urls_lead_to_files(hook):
    assert all((ROOT / page).is_file() for page in hook._PAGES.values())


def test_code_is_left_alone(hook):
    text = "[a](b.md)\n```\nx[0](y)\n```\n![i](c.png) [w](https://x.example) [h](#head)\n"
    packaged = hook.packaged(text, ADDRESS)
    assert packaged == text.replace("(b.md)", f"({ADDRESS}/b.md)").replace("(c.png)", f"({ADDRESS}/c.png?raw=true)")


def test_all_is_everything_but_engines_and_what_the_system_must_have():
    extras = PROJECT["optional-dependencies"]
    (everything,) = re.findall(r"kvgraft\[([\w,]+)\]", " ".join(extras["all"]))
    assert set(everything.split(",")) == set(extras) - {"all", "dev", "docs", "vllm", "sglang", "lmcache", "mooncake"}


def test_metadata_names_author_and_versions_of_python():
    assert PROJECT["authors"]
    versions = {line.rsplit(" ", 1)[1] for line in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d", line)}
    assert versions == {"3.11", "3.12", "3.13"}
    assert PROJECT["requires-python"] == ">=3.11"


def test_sdist_has_what_the_build_reads():
    included = PYPROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert {"src", "README.md", "LICENSE", HOOK["path"].split("/")[0]} <= set(included)
    assert not [name for name in included if not (ROOT / name).exists()]
