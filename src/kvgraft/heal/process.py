"""Several servers from one process: what each is, whether it can be healed, and a healer for each of them."""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import aiohttp

from kvgraft.heal.healer import Healer
from kvgraft.heal.probe import require_publisher
from kvgraft.heal.server import Kind, Server
from kvgraft.heal.texts import Texts
from kvgraft.router.subscriber import EventReader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.heal.healer import HealSettings
    from kvgraft.router import WorkerSpec
    from kvgraft.router.sequence import BatchSequence

logger = logging.getLogger(__name__)


async def heal(
    workers: Sequence[WorkerSpec],
    settings: HealSettings,
    *,
    api_key: str = "",
    priority: int | None = None,
    closing: asyncio.Event,
) -> bool:
    """Heal all servers until `closing` is set, or with `settings.once` until nothing is left.

    Those that heal themselves are left alone. A server that goes away later is waited for.

    Args:
        workers: Each with `events`.
        settings: Pace, and when it ends.
        api_key: Of all of them; empty for none.
        priority: See `Server`.
        closing: Ends it, within what closing a connection takes.

    Returns:
        Whether all is well: False if with `once` something was given up, or the healing of a server failed.

    Raises:
        ConfigError: A server cannot be healed, or does not publish at its endpoint.
        ServerError: A server does not answer, or does not say how busy it is.
    """
    async with aiohttp.ClientSession(trust_env=False) as session:
        with ExitStack() as readers:
            healers = []
            for worker in workers:
                server = Server(session, worker.url, api_key=api_key, priority=priority)
                if await _heals_itself(server):
                    continue
                assert worker.events is not None
                await asyncio.to_thread(require_publisher, worker.events, worker.replay)
                texts = Texts()
                reader = EventReader([worker], texts)
                readers.callback(reader.close)
                sequence = reader.sequences()[worker.name]
                healers.append(Healer(server, texts, settings, is_settled=partial(_is_settled, sequence)))
            return all(await asyncio.gather(*(_run(healer, closing) for healer in healers)))


async def _run(healer: Healer, closing: asyncio.Event) -> bool:
    """Heal one server; a failure of ours there does not end the healing of others."""
    try:
        await healer.run(closing)
    except Exception:
        logger.exception("healing has failed and ends: %s", healer.line())
        return False
    return not healer.has_given_up


async def _heals_itself(server: Server) -> bool:
    about = await server.describe()
    if about.kind is Kind.KVGRAFT:
        logger.warning("%s is kvgraft serve, which heals itself (its setting heal); nothing is done for it", server.url)
        return True
    await server.num_requests()
    logger.info("%s is %s and serves %s", server.url, about.kind, about.model)
    return False


def _is_settled(sequence: BatchSequence) -> bool:
    return not sequence.is_waiting
