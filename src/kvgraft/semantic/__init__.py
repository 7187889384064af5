"""Stored texts that resemble a prompt: embedders, an index of their vectors, and a thread that fills it. Numpy alone.

Neural embedders and graphs over very many vectors are extras, loaded when they are asked for.

Public modules: `registry`.
"""

from kvgraft.semantic.base import Decoder, Embedder, Vectors, unit_rows
from kvgraft.semantic.decoder import decoder_of
from kvgraft.semantic.discovery import Discovery, DiscoveryCounters
from kvgraft.semantic.index import CosineIndex, Neighbour
from kvgraft.semantic.minhash import MinHashSketch
from kvgraft.semantic.minilm import MiniLMEmbedder, MiniLMFiles
from kvgraft.semantic.proposer import DonorProposer
from kvgraft.semantic.provider import EmbeddingProvider, MiniLMProvider, SketchProvider
from kvgraft.semantic.registry import create_embedder, register_embedder
from kvgraft.semantic.tfidf import TfIdfSketch

__all__ = [
    "CosineIndex",
    "Decoder",
    "Discovery",
    "DiscoveryCounters",
    "DonorProposer",
    "Embedder",
    "EmbeddingProvider",
    "MinHashSketch",
    "MiniLMEmbedder",
    "MiniLMFiles",
    "MiniLMProvider",
    "Neighbour",
    "SketchProvider",
    "TfIdfSketch",
    "Vectors",
    "create_embedder",
    "decoder_of",
    "register_embedder",
    "unit_rows",
]
