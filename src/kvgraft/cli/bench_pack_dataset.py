"""`kvgraft bench pack dataset`: a request pack from local files of a public data set."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from kvgraft.bench.datasets import PublicDataset

_FIELDS = {
    "messages": "of the messages of a conversation",
    "session": "of what conversations of one user share",
    "document": "of the document",
    "question": "of the question about it",
    "answers": "of the answers that are right",
}
_SHAPES = {"each": False, "joined": True}


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "dataset",
        help="local files of a public data set",
        description="Write NAME.requests.jsonl, and NAME.docs.jsonl if there are documents, from files you have: .jsonl, "
        ".json, .csv, .txt or .raw, possibly .gz, or .parquet (with pyarrow). NAME is wildchat, cnn_dailymail, multi_news, "
        "samsum, wikitext-103, longeval, narrativeqa, triviaqa, scbench or loogle; 'conversation', 'document' and "
        "'question' are for any other. A PATH is a field's name, or names joined by dots (answers.text). Requests over "
        "documents have one instruction after the other before them and come in an order drawn by --seed, conversations as "
        "the file has them.",
    )
    add = parser.add_argument
    add("name", metavar="NAME", help="data set, or shape of its requests")
    add("files", nargs="+", metavar="FILE", help="its files, read one after the other")
    add("--output", required=True, metavar="DIR", help="folder of the pack")
    add("--limit", type=int, default=1_000, metavar="N", help="conversations or documents that are used (default 1000)")
    add(
        "--min-characters",
        type=int,
        metavar="N",
        help="shorter prompts or documents are left out (default: by data set)",
    )
    add("--askings", type=int, metavar="N", help="requests per document or question (default: by data set)")
    add(
        "--turns",
        choices=_SHAPES,
        help="each: a prompt per turn of a user, after all that was said before; joined: one per conversation, its user's "
        "turns, of users with several (default: by data set)",
    )
    add("--instruction", action="append", metavar="TEXT", help="stands before documents; several are taken in turns")
    add("--seed", type=int, default=0, metavar="N", help="of the order of requests over documents (default 0)")
    for name, about in _FIELDS.items():
        add(f"--{name}", metavar="PATH", help=f"path {about}")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Make the pack."""
    from kvgraft.bench.datasets import PackSettings, make_pack, write_pack

    given = {} if args.instruction is None else {"instructions": tuple(args.instruction)}
    settings = PackSettings(limit=args.limit, seed=args.seed, **given)
    pack = make_pack(_dataset(args), [Path(file) for file in args.files], settings)
    path = write_pack(pack, Path(args.output), args.name)
    print(f"{path}: {len(pack.requests)} requests, {len(pack.documents)} documents")
    return 0


def _dataset(args: argparse.Namespace) -> PublicDataset:
    """Return the data set of the name with what the command line says of it otherwise."""
    from kvgraft.bench.datasets import DATASETS

    if args.name not in DATASETS:
        raise ConfigError(f"there is no data set {args.name!r}; choose of {', '.join(DATASETS)}")
    dataset = DATASETS[args.name]
    fields = dict(dataset.fields) | {name: (path,) for name in _FIELDS if (path := getattr(args, name)) is not None}
    changes: dict[str, Any] = {"fields": fields}
    for name, least in (("min_characters", 0), ("askings", 1)):
        value = getattr(args, name)
        if value is not None:
            if value < least:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, not {value}")
            changes[name] = value
    if args.turns is not None:
        changes["joins_turns"] = _SHAPES[args.turns]
    return replace(dataset, **changes)
