"""Read block traces: requests as chains of hashed blocks, without text. Replays nothing.

A trace is one of
    Mooncake     `{"input_length": n, "hash_ids": [..]}` per line, 512 tokens per block
    Claude Code  `{"id": s, "block_size": n, "requests": [{"in": n, "hash_ids": [..]} | {"requests": [..]}]}` per line: one
                 session with its sub-agents, ids valid within it
each possibly with `.gz`; other keys are ignored.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvgraft.types import TokenArray

_MOONCAKE_BLOCK = 512


@dataclass(frozen=True, slots=True, eq=False)
class BlockRequest:
    """One prompt.

    Attributes:
        session: What its ids are valid within; None for ids that are valid everywhere.
        num_tokens: Length of the prompt.
        block_ids: int64 ids of its blocks; the last one may be partly filled.
    """

    session: str | None
    num_tokens: int
    block_ids: TokenArray


@dataclass(frozen=True, slots=True, eq=False)
class BlockTrace:
    """Prompts in order of arrival.

    Attributes:
        name: File name without endings.
        block_size: Tokens per block.
        requests: In order; where sessions are recorded one by one, one session after the other.
    """

    name: str
    block_size: int
    requests: tuple[BlockRequest, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(request.num_tokens for request in self.requests)


def load_block_trace(path: str) -> BlockTrace:
    """Read a trace.

    Raises:
        ConfigError: The file is missing or is no block trace; names the line.
    """
    requests: list[BlockRequest] = []
    block_sizes: set[int] = set()
    for number, record in _records(Path(path)):
        try:
            if "requests" in record:
                block_sizes.add(int(record["block_size"]))
                requests += _session_requests(record["requests"], str(record["id"]))
            else:
                block_sizes.add(_MOONCAKE_BLOCK)
                requests.append(_request(None, record["input_length"], record["hash_ids"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}:{number} is no request of a block trace: {error!r}") from error
    if len(block_sizes) != 1:
        raise ConfigError(f"{path} has blocks of {sorted(block_sizes) or 'no'} tokens; one size is needed")
    return BlockTrace(Path(path).name.split(".")[0], block_sizes.pop(), tuple(requests))


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            for number, line in enumerate(lines, 1):
                yield number, json.loads(line)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON lines file: {error}") from error


def _session_requests(records: list[dict[str, Any]], session: str) -> Iterator[BlockRequest]:
    for record in records:
        if "requests" in record:
            yield from _session_requests(record["requests"], session)
        else:
            yield _request(session, record["in"], record["hash_ids"])


def _request(session: str | None, num_tokens: int, block_ids: list[int]) -> BlockRequest:
    return BlockRequest(session, int(num_tokens), np.array(block_ids, dtype=np.int64))
