"""docs/reference/settings.md: the settings of the embedded engine and its server, and how those of vLLM and SGLang differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvgraft.config import ServerConfig, SGLangConfig, VLLMConfig, settings_table
from kvgraft.config.setting import rule_of
from kvgraft.config.table import default_text

if TYPE_CHECKING:
    import dataclasses

    from kvgraft.config.settings import Settings

_HEAD = """\
# Settings

How to give them: [configuration.md](../configuration.md). A default of `-` is empty.

## `kvgraft serve`, `LLM`, `AsyncLLM`

"""
_ADAPTERS = """\
## vLLM and SGLang

In vLLM they stand in `kv_connector_extra_config`, in SGLang they are variables (`KVGRAFT_MIN_RUN=32`) or lie in the file that
`KVGRAFT_CONFIG` names. Both take these settings with the meaning and the default above: {shared}. What differs, or is theirs
alone (`-`: not there):

| setting | vLLM | SGLang | meaning |
|---|---|---|---|
"""


def settings_page() -> str:
    """Return the page."""
    shared = [name for name in VLLMConfig.rules() if _is_shared(name)]
    names = dict.fromkeys([*VLLMConfig.rules(), *SGLangConfig.rules()])
    rows = [_row(name) for name in names if name not in shared]
    text = ", ".join(f"`{name}`" for name in shared)
    return _HEAD + settings_table() + "\n" + _ADAPTERS.format(shared=text) + "\n".join(rows) + "\n"


def _field(kind: type[Settings], name: str) -> dataclasses.Field[Any] | None:
    return kind.field(name) if name in kind.rules() else None


def _is_shared(name: str) -> bool:
    fields = [_field(kind, name) for kind in (ServerConfig, VLLMConfig, SGLangConfig)]
    return None not in fields and len({(f.default, rule_of(f).help, rule_of(f).choices) for f in fields if f}) == 1


def _row(name: str) -> str:
    found = [_field(kind, name) for kind in (VLLMConfig, SGLangConfig)]
    field = next(each for each in found if each is not None)
    rules = [rule_of(each) for each in found if each is not None]
    choices = " or ".join(dict.fromkeys(", ".join(f"`{choice}`" for choice in rule.choices) for rule in rules))
    defaults = " | ".join("-" if each is None else f"`{default_text(each)}`" for each in found)
    return f"| `{name}` | {defaults} | {rule_of(field).help}{f' ({choices})' if choices else ''} |"
