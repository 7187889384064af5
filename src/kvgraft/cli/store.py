"""`kvgraft store`: list, verify, shrink and copy a store of donors."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgraft.errors import ConfigError, StoreError
from kvgraft.memory.store import open_store
from kvgraft.memory.store.inspection import damage_of, donors_in, export_donor
from kvgraft.memory.store.options import read_options

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from kvgraft.memory.store import KVStore

_DAY_S = 86_400.0
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "store",
        help="look into a store of donors, verify, clear or export it",
        description="Look into a store of donors. STORE is a directory or what the setting `store` names: file:DIR, redis://...",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = _action(actions, "ls", run_ls, "list spaces, or the donors of one", "Prints no token and no salt.")
    listing.add_argument("--space", default="", help="list the donors of this space; other stores than file need it")
    listing.add_argument("--json", action="store_true", help="print JSON with every donor")
    verify = _action(
        actions,
        "verify",
        run_verify,
        "read everything and compare checksums",
        "Prints a line for each damaged donor; exit code 1 if there are any, also with --remove.",
    )
    verify.add_argument("--space", default="", help="only this space; other stores than file need it")
    verify.add_argument("--remove", action="store_true", help="remove what is damaged")
    gc = _action(
        actions,
        "gc",
        run_gc,
        "remove what is not needed",
        "Removes what killed processes have left, then what the options name. For file stores only; engines may go on.",
    )
    gc.add_argument(
        "--max-bytes", default="", metavar="SIZE", help="remove what is worth least down to this size: 5GiB"
    )
    gc.add_argument(
        "--unused-days",
        type=float,
        metavar="N",
        help="remove spaces of which nothing was used for N days: those of models that are no more",
    )
    export = _action(
        actions,
        "export",
        run_export,
        "copy donors to files that other tools open",
        "Writes safetensors files with `tokens` and `kv`, a row of bytes per token; the header says how a row is laid out.",
    )
    export.add_argument("--space", required=True, help="from which space")
    export.add_argument("--key", default="", help="one donor; without it all of the space")
    export.add_argument("to", metavar="TO", type=Path, help="a file for one donor, a folder for many")


def run_ls(args: argparse.Namespace) -> int:
    """List."""
    store = _open(args.store)
    spaces = {space: [asdict(donor) for donor in donors_in(store, space)] for space in _spaces(store, args.space)}
    for space, donors in spaces.items():
        used_at = _used_at(store, space)
        for donor in donors:
            donor["unused_s"] = round(time.time() - used_at[donor["key"]], 1) if donor["key"] in used_at else None
    if args.json:
        print(json.dumps({space: {**_totals(donors), "donors": donors} for space, donors in spaces.items()}, indent=1))
        return 0
    lines = _donor_lines(spaces[args.space]) if args.space else _space_lines(spaces)
    print("\n".join(lines))
    return 0


def run_verify(args: argparse.Namespace) -> int:
    """Verify; 1 if anything is damaged."""
    store = _open(args.store)
    num_whole = num_damaged = 0
    for space in _spaces(store, args.space):
        for key in sorted(store.keys(space)):
            try:
                damage = damage_of(store, space, key)
            except StoreError as error:
                if store.keys(space) >= {key}:
                    raise
                print(f"{space}/{key}: gone meanwhile ({error})")
                continue
            num_whole += not damage
            num_damaged += bool(damage)
            if damage:
                print(f"{space}/{key}: {damage}" + ("; removed" if args.remove else ""))
            if damage and args.remove:
                store.remove(space, key)
    print(f"{num_whole} whole, {num_damaged} damaged" + (", removed" if num_damaged and args.remove else ""))
    return 1 if num_damaged else 0


def run_gc(args: argparse.Namespace) -> int:
    """Clear."""
    if args.unused_days is not None and not 0 <= args.unused_days < math.inf:
        raise ConfigError(f"--unused-days is a number of days of 0 or more, not {args.unused_days:g}")
    from kvgraft.memory.store.file import FileStore, FileStoreOptions

    given = {"max_bytes": args.max_bytes} if args.max_bytes else {}
    limit = read_options("file", FileStoreOptions, given).max_bytes
    store = _open(args.store)
    if not isinstance(store, FileStore):
        raise ConfigError(f"gc clears directories, not a store of kind {store.name!r}, which has limits of its own")
    before = store.used_bytes
    if args.unused_days is not None:
        for space in store.spaces():
            last = max((file.used_at for file in store.files(space)), default=0.0)
            if time.time() - last >= args.unused_days * _DAY_S:
                print(f"{space}: {store.clear(space)} donors removed, unused for {args.unused_days:g} days")
    if args.max_bytes:
        store.trim(limit)
        print(f"{store.budget.num_evicted} donors removed to keep {size(limit)}")
    print(f"{size(before)} before, {size(store.used_bytes)} now")
    return 0


def run_export(args: argparse.Namespace) -> int:
    """Copy."""
    store = _open(args.store)
    if args.key:
        print(f"{args.to}: {size(export_donor(store, args.space, args.key, args.to))}")
        return 0
    keys = sorted(store.keys(args.space))
    if not keys:
        raise ConfigError(f"there is nothing in space {args.space!r}; `kvgraft store ls` lists spaces")
    try:
        args.to.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"{args.to} is no folder and cannot be made: {error}; choose another place") from error
    num_damaged = 0
    for key in keys:
        try:
            export_donor(store, args.space, key, args.to / f"{key}.safetensors")
        except StoreError as error:
            num_damaged += 1
            print(f"{key}: {error}")
    print(f"{args.to}: {len(keys) - num_damaged} donors" + (f", {num_damaged} were not copied" if num_damaged else ""))
    return 1 if num_damaged else 0


def size(num_bytes: int) -> str:
    """Format bytes for people."""
    unit, name = next(((unit, name) for unit, name in _UNITS if num_bytes >= unit), (1, "bytes"))
    return f"{num_bytes / unit:.1f} {name}" if unit > 1 else f"{num_bytes} bytes"


def _action(actions: Any, name: str, run: Any, help_text: str, more: str) -> argparse.ArgumentParser:  # noqa: ANN401
    sentence = help_text[0].upper() + help_text[1:]
    parser: argparse.ArgumentParser = actions.add_parser(name, help=help_text, description=f"{sentence}. {more}")
    parser.add_argument("store", metavar="STORE", help="a directory, or a store as in the setting `store`")
    parser.set_defaults(run=run)
    return parser


def _open(text: str) -> KVStore:
    """Open a store; a directory is not made."""
    url = text if ":" in text and not Path(text).is_dir() else f"file:{text}"
    if url.startswith("file:"):
        where = Path(url.removeprefix("file:").partition("?")[0]).expanduser()
        if not where.is_dir():
            raise ConfigError(f"there is no directory {where}; name the one of the setting `store`")
    return open_store(url)


def _spaces(store: KVStore, chosen: str) -> list[str]:
    if chosen:
        return [chosen]
    spaces = getattr(store, "spaces", None)
    if spaces is None:
        raise ConfigError(
            f"a store of kind {store.name!r} does not list its spaces; pass --space, which the engine logs"
        )
    return list(spaces())


def _used_at(store: KVStore, space: str) -> dict[str, float]:
    files = getattr(store, "files", None)
    return {} if files is None else {file.key: file.used_at for file in files(space)}


def _totals(donors: list[dict[str, Any]]) -> dict[str, Any]:
    ages = [donor["unused_s"] for donor in donors if donor["unused_s"] is not None]
    return {
        "num_donors": len(donors),
        "num_tokens": sum(donor["num_tokens"] for donor in donors),
        "num_bytes": sum(donor["num_bytes"] for donor in donors),
        "num_damaged": sum(bool(donor["problem"]) for donor in donors),
        "unused_s": min(ages, default=None),
    }


def _space_lines(spaces: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    if not spaces:
        yield "nothing is stored"
        return
    yield f"{'space':32}  {'donors':>7}  {'tokens':>10}  {'size':>10}  last used"
    for space, donors in spaces.items():
        total = _totals(donors)
        damaged = f", {total['num_damaged']} heads are damaged" if total["num_damaged"] else ""
        numbers = f"{total['num_donors']:>7}  {total['num_tokens']:>10}  {size(total['num_bytes']):>10}"
        yield f"{space:32}  {numbers}  {_age(total['unused_s'])}{damaged}"


def _donor_lines(donors: list[dict[str, Any]]) -> Iterator[str]:
    yield f"{'key':32}  {'tokens':>8}  {'size':>10}  {'namespace':10}  {'generation':>10}  last used"
    for donor in donors:
        if donor["problem"]:
            yield f"{donor['key']:32}  {donor['problem']}"
            continue
        numbers = f"{donor['num_tokens']:>8}  {size(donor['num_bytes']):>10}"
        who = f"{donor['namespace'][:8]:10}  {donor['generation']:>10}"
        yield f"{donor['key']:32}  {numbers}  {who}  {_age(donor['unused_s'])}"


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    for unit, name in ((_DAY_S, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= unit:
            return f"{seconds / unit:.1f} {name} ago"
    return f"{max(seconds, 0.0):.0f} seconds ago"
