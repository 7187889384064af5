"""Lets SGLang's prefix caches be imported where its GPU packages are missing. Imported before anything of SGLang.

A package that is not installed becomes an empty stand-in whose attributes are mocks; the trees use none of them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from unittest.mock import MagicMock


class _AnyAttribute(type):
    """Classes taken from a stand-in may be subclassed and have any attribute."""

    def __getattr__(cls, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


def _schema(_cls: object, _source: object, _handler: object) -> object:
    from pydantic_core import core_schema

    return core_schema.any_schema()


class _StandIn(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012 (an attribute of modules)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if not name[0].isupper():
            return MagicMock(name=name)
        members = {
            "__init__": lambda self, *args, **options: None,
            "__get_pydantic_core_schema__": classmethod(_schema),
        }
        return _AnyAttribute(name, (), members)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".", maxsplit=1)[0] not in self._names or _is_probed():
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _StandIn(spec.name)
        module.__version__, module.__file__ = "0.0.0", "<stand-in>"  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _is_probed() -> bool:
    """Whether transformers asks if an optional package is there: it is told the truth."""
    frame = sys._getframe()
    while frame is not None:
        if "import_utils" in frame.f_code.co_filename and "available" in frame.f_code.co_name:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


_NAMES = """
    IPython PIL aiohttp anthropic apache_tvm_ffi av blobfile compressed_tensors cuda cutlass cv2 datasets decord decord2
    deep_ep deep_gemm deepseek_recipe easydict flash_attn flash_mla flashinfer gguf humming interegular kernels llguidance
    lmcache mistral_common modelscope mooncake nixl numba nvidia openai openai_harmony outlines partial_json_parser
    pydantic_settings quack scipy sentencepiece sgl_kernel smg_grpc_servicer soundfile tiktoken tilelang timm tml_renderers
    torch_memory_saver torchao torchaudio torchvision triton tvm_ffi uvicorn uvloop watchfiles xgrammar zstandard
"""


def install() -> None:
    """Put the stand-ins behind everything that is really installed."""
    warnings.simplefilter("ignore")
    sys.meta_path.append(_Finder(frozenset(_NAMES.split())))
    from transformers.models.auto import configuration_auto

    register = configuration_auto._LazyConfigMapping.register
    configuration_auto._LazyConfigMapping.register = (  # SGLang registers classes that newer transformers know
        lambda self, key, value, exist_ok=False: register(self, key, value, exist_ok=True)
    )
