"""Embedders by name: ours, registered ones, and those of installed packages."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.semantic.embedders import BagEmbedder

from kvgraft.errors import ConfigError, IntegrationError
from kvgraft.semantic import create_embedder, register_embedder


@pytest.mark.parametrize("name", ["minhash", "tfidf"])
def test_sketches_need_nothing(name):
    embedder = create_embedder(name)
    assert embedder.name == name
    assert embedder.is_quick
    with pytest.raises(ConfigError, match="reads no files; leave ':/x' out"):
        create_embedder(f"{name}:/x")


def test_a_registered_one_gets_decoder_and_path():
    given = []
    register_embedder("bag", lambda **options: given.append(options) or BagEmbedder())
    assert create_embedder("bag:C:/weights", str).name == "bag"
    create_embedder("bag")
    assert given == [{"decode": str, "path": "C:/weights"}, {"decode": None, "path": ""}]


@pytest.mark.parametrize("name", ["", " ", "none", "a:b", "minilm"])
def test_names_that_mean_something_else_are_refused(name):
    with pytest.raises(ConfigError, match="name"):
        register_embedder(name, lambda **_: BagEmbedder())


def test_an_unknown_name_gets_one_line():
    with pytest.raises(ConfigError, match=r"unknown embedder 'minhsh'; did you mean 'minhash'\?"):
        create_embedder("minhsh")
    with pytest.raises(ConfigError, match="known are minhash, minilm, tfidf"):
        create_embedder("qqqq")


def test_what_is_no_embedder_is_refused():
    register_embedder("bad", lambda **_: object())
    with pytest.raises(IntegrationError, match="'bad' is a object"):
        create_embedder("bad")


def test_minilm_needs_a_decoder():
    with pytest.raises(ConfigError, match="give it decode="):
        create_embedder("minilm")


def test_an_installed_package_is_found_by_its_entry_point(monkeypatch, tmp_path):
    (tmp_path / "toy_embedder.py").write_text(
        "import numpy as np\nfrom kvgraft.semantic import Embedder\n"
        "class Toy(Embedder):\n    name = 'toy'\n    dimensions = 1\n"
        "    def embed(self, texts):\n        return np.ones((len(texts), 1), np.float32)\n"
        "def make(*, decode, path):\n    return Toy()\n"
    )
    info = tmp_path / "toy_embedder-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-embedder\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[kvgraft.embedders]\ntoy = toy_embedder:make\nbroken = toy_embedder:nothing\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    np.testing.assert_array_equal(create_embedder("toy").embed([np.arange(3)]), [[1]])
    with pytest.raises(IntegrationError, match=r"'broken' \(toy_embedder:nothing\) cannot be loaded"):
        create_embedder("broken")
