"""Request packs from local files of public data sets; nothing is downloaded."""

from kvgraft.bench.datasets.known import DATASETS, PublicDataset
from kvgraft.bench.datasets.pack import Pack, PackSettings, make_pack, write_pack

__all__ = ["DATASETS", "Pack", "PackSettings", "PublicDataset", "make_pack", "write_pack"]
