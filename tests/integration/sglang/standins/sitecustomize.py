"""Stand-ins for packages that SGLang imports and a machine without a GPU lacks. Loaded by Python at start-up.

An installed package always wins. A stand-in module gives away classes that do nothing: they can be subclassed, used in
annotations and put over functions as decorators. SGLang imports these packages for other devices and executes none of them.
"""

import importlib.abc
import importlib.machinery
import sys
import types

ABSENT = frozenset(
    (
        "anthropic",
        "apache_tvm_ffi",
        "av",
        "cuda",
        "cutlass",
        "cv2",
        "datasets",
        "decord",
        "decord2",
        "deep_ep",
        "deep_gemm",
        "deepseek_recipe",
        "easydict",
        "flash_attn",
        "flash_mla",
        "flashinfer",
        "humming",
        "kernels",
        "mistral_common",
        "modelscope",
        "mooncake",
        "nixl",
        "nvidia",
        "outlines",
        "quack",
        "sgl_kernel",
        "smg_grpc_servicer",
        "soundfile",
        "tilelang",
        "timm",
        "tml_renderers",
        "torch_memory_saver",
        "torchao",
        "torchaudio",
        "torchvision",
        "tvm_ffi",
        "watchfiles",
        "xgrammar",
    )
)
ASKED_HONESTLY = ("accelerate", "huggingface_hub", "torch", "transformers")
"""Packages that look for others and do without; they must not find a stand-in."""


class _Inert(type):
    """Class of the stand-ins: attributes are stand-ins too, and so are unions and subscripts."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = _stand_in(name, cls.__module__)
        setattr(cls, name, made)
        return made

    def __or__(cls, other):
        return cls

    __ror__ = __or__

    def __getitem__(cls, item):
        return cls

    def __iter__(cls):
        return iter(())


def _decorate(*args, **kwargs):
    """Leave a decorated function as it is; anything else is nothing."""
    return args[0] if len(args) == 1 and not kwargs and callable(args[0]) else None


def _stand_in(name, module):
    def construct(cls, *args, **kwargs):
        if not cls.__dict__.get("_is_stand_in"):
            return object.__new__(cls)  # a real subclass
        return _decorate(*args, **kwargs) or _decorate

    def any_schema(cls, source, handler):
        from pydantic_core import core_schema

        return core_schema.any_schema()

    return _Inert(
        name,
        (),
        {
            "__module__": module,
            "__new__": construct,
            "_is_stand_in": True,
            "__get_pydantic_core_schema__": classmethod(any_schema),
        },
    )


class _Module(types.ModuleType):
    __path__ = ()
    __version__ = "0.0.0"
    __file__ = "<stand-in>"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = _stand_in(name, self.__name__)
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] not in ABSENT or _asker() in ASKED_HONESTLY:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


def _asker():
    """Top-level package of the code that imports."""
    frame = sys._getframe(2)
    while frame is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    return "" if frame is None else frame.f_globals.get("__name__", "").partition(".")[0]


sys.meta_path.append(_Finder())
