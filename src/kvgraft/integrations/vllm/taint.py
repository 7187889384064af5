"""Keep approximate K/V out of vLLM's prefix cache.

vLLM publishes loaded tokens like computed ones. The connector is asked between vLLM's own lookup and the allocation: the
last moment at which the hashes of a request's blocks can be made private. Hashes are chained, so that blocks filled later,
those of the answer included, inherit it. `Request.block_hashes` is no documented interface; what it must look like is
checked.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING

from kvgraft.errors import IntegrationError

if TYPE_CHECKING:
    from vllm.v1.request import Request


def taint_block_hashes(request: Request, first_block: int) -> None:
    """Replace the hashes from `first_block` on by values that no other request has.

    Raises:
        IntegrationError: The hashes are not a list of bytes; nothing was changed.
    """
    hashes = request.block_hashes
    if not isinstance(hashes, list) or not all(isinstance(value, bytes) for value in hashes[:1]):
        raise IntegrationError("vLLM keeps block hashes in another form than a list of bytes: nothing can be grafted")
    nonce = secrets.token_bytes(32)
    for index in range(first_block, len(hashes)):
        digest = hashlib.blake2b(hashes[index], key=nonce, person=b"kvgraft.priv")
        hashes[index] = type(hashes[index])(digest.digest()[: len(hashes[index])])
