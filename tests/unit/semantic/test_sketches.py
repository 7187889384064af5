"""Sketches of token ids: what their cosine estimates, and that nothing but the tokens counts."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraft.errors import ConfigError
from kvgraft.semantic import MinHashSketch, TfIdfSketch

KEY = b"k" * 32
SKETCHES = [MinHashSketch(512, key=KEY), TfIdfSketch(384, key=KEY)]


def text(seed, length):
    return np.random.default_rng(seed).integers(1_000, 50_000, length)


def shingles(tokens):
    return {tuple(tokens[i : i + 8]) for i in range(len(tokens) - 7)}


def jaccard(first, second):
    return len(shingles(first) & shingles(second)) / len(shingles(first) | shingles(second))


@pytest.mark.parametrize("sketch", SKETCHES, ids=lambda sketch: sketch.name)
class TestEverySketch:
    def test_rows_are_float32_of_length_1(self, sketch):
        rows = sketch.embed([text(0, 100), text(1, 5_000)])
        assert rows.dtype == np.float32
        assert rows.shape == (2, sketch.dimensions)
        np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, rtol=1e-5)

    def test_no_text_is_a_row_of_zeros(self, sketch):
        rows = sketch.embed([np.empty(0, np.int64), text(0, 50)])
        assert not rows[0].any()
        assert rows[1].any()
        assert sketch.embed([]).shape == (0, sketch.dimensions)

    def test_a_text_has_one_vector_whatever_is_embedded_with_it(self, sketch):
        alone, first = text(0, 300), text(1, 40)
        np.testing.assert_array_equal(sketch.embed([alone])[0], sketch.embed([first, alone])[1])
        np.testing.assert_array_equal(sketch.embed([alone])[0], sketch.embed([alone.astype(np.int32)])[0])

    def test_other_keys_give_other_vectors(self, sketch):
        other = type(sketch)(sketch.dimensions, key=b"other")
        assert abs(float(sketch.embed([text(0, 500)])[0] @ other.embed([text(0, 500)])[0])) < 0.3

    def test_one_process_has_one_key(self, sketch):
        same = [type(sketch)(sketch.dimensions).embed([text(0, 500)])[0] for _ in range(2)]
        np.testing.assert_array_equal(*same)

    def test_unrelated_texts_are_far_apart(self, sketch):
        rows = sketch.embed([text(seed, 1_000) for seed in range(30)])
        similarities = (rows @ rows.T)[np.triu_indices(30, 1)]
        assert np.abs(similarities).max() < 0.25


class TestMinHash:
    @pytest.mark.parametrize("edits", [0, 10, 40, 150, 400])
    def test_cosine_estimates_the_jaccard_index(self, edits):
        original = text(0, 4_000)
        edited = original.copy()
        edited[np.random.default_rng(1).choice(4_000, edits, replace=False)] = 7
        cosines = []
        for key in range(8):
            first, second = MinHashSketch(512, key=bytes([key])).embed([original, edited])
            cosines.append(float(first @ second))
        # Eight independent sketches of 512 signs: the standard deviation of their mean is below 0.016.
        assert np.mean(cosines) == pytest.approx(jaccard(original, edited), abs=0.06)

    def test_order_of_passages_does_not_matter_and_order_of_tokens_does(self):
        passages = [text(seed, 300) for seed in range(10)]
        original, shuffled, mixed = (
            np.concatenate(passages),
            np.concatenate(passages[::-1]),
            np.random.default_rng(0).permutation(np.concatenate(passages)),
        )
        first, second, third = SKETCHES[0].embed([original, shuffled, mixed])
        assert first @ second > 0.85
        assert abs(first @ third) < 0.25

    def test_a_short_text_inside_a_long_one_is_found(self):
        passage = text(0, 200)
        sketches = SKETCHES[0].embed([passage, np.concatenate([text(1, 300), passage, text(2, 300)])])
        assert sketches[0] @ sketches[1] > 0.2

    def test_text_shorter_than_a_shingle_has_no_vector(self):
        assert not SKETCHES[0].embed([text(0, 7)]).any()
        assert SKETCHES[0].embed([text(0, 8)]).any()

    @pytest.mark.parametrize("dimensions", [0, 1, 3, 500, 1 << 17])
    def test_dimensions_are_a_power_of_two(self, dimensions):
        with pytest.raises(ConfigError, match="must be a power of two"):
            MinHashSketch(dimensions)


class TestTfIdf:
    def test_order_does_not_matter(self):
        tokens = text(0, 500)
        first, second = SKETCHES[1].embed([tokens, np.random.default_rng(0).permutation(tokens)])
        np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-6)

    def test_rare_tokens_count_more_than_common_ones(self):
        rare, common, other = text(0, 100), np.arange(1, 101), text(1, 100)
        query = np.concatenate([rare, common])
        sketches = SKETCHES[1].embed(
            [query, np.concatenate([rare, np.arange(200, 300)]), np.concatenate([other, common])]
        )
        assert sketches[0] @ sketches[1] > 0.8
        assert sketches[0] @ sketches[2] < 0.3

    def learnt(self, num_texts):
        """A sketch that has heard of texts with a common part, and that part."""
        sketch, common = TfIdfSketch(key=KEY), text(99, 300)
        heard = [sketch.learn(np.concatenate([common, text(seed, 100)])) for seed in range(num_texts)]
        return sketch, common, heard

    def test_what_all_stored_texts_have_says_nothing(self):
        other = text(1_000, 100)
        before, after = self.learnt(31), self.learnt(32)
        for (sketch, common, _), is_near in ((before, True), (after, False)):
            first, second = sketch.embed([np.concatenate([common, text(0, 100)]), np.concatenate([common, other])])
            assert (first @ second > 0.5) == is_near

    def test_weights_change_when_the_texts_have_doubled_and_not_between(self):
        sketch, _, heard = self.learnt(130)
        assert [number for number, is_new in enumerate(heard, 1) if is_new] == [32, 64, 128]
        before = sketch.embed([text(0, 100)])
        sketch.learn(text(0, 100))
        np.testing.assert_array_equal(sketch.embed([text(0, 100)]), before)

    def test_ids_that_nobody_has_seen_are_rare(self):
        sketch, common, _ = self.learnt(64)
        sketch.learn(np.array([-5, 1 << 40, 3]))
        rows = sketch.embed([np.append(common, [1 << 40, 1 << 30, -7]), np.array([1 << 40, 1 << 30, -7])])
        assert np.isfinite(rows).all()
        assert rows[0] @ rows[1] > 0.9

    @pytest.mark.parametrize("dimensions", [0, -64])
    def test_dimensions_are_at_least_one(self, dimensions):
        with pytest.raises(ConfigError, match="must be at least 1"):
            TfIdfSketch(dimensions)
