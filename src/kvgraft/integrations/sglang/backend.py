"""Build the cache in SGLang's scheduler process, switch reuse on where it is proved to be right, and say so."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kvgraft import __version__
from kvgraft.config import SGLangConfig, resolve
from kvgraft.donors import CostModel, new_secret
from kvgraft.errors import ConfigError, IntegrationError, ModelError
from kvgraft.graft.drift import drift_correction
from kvgraft.graft.select import FirstK, NoRecompute, expected_share
from kvgraft.graft.weights import weights_digest
from kvgraft.integrations.sglang.donors.continuations import Continuations
from kvgraft.integrations.sglang.donors.keeper import DonorKeeper
from kvgraft.integrations.sglang.donors.kv_buffers import KVBuffers
from kvgraft.integrations.sglang.donors.loader import Loader
from kvgraft.integrations.sglang.donors.request_texts import RequestTexts
from kvgraft.integrations.sglang.planning.planner import LoadPlanner, chosen_policy
from kvgraft.integrations.sglang.planning.ranks import Ranks, TensorParallelRanks, shared_secret
from kvgraft.integrations.sglang.recompute.model import SGLangRows
from kvgraft.integrations.sglang.recompute.recomputer import Recomputer
from kvgraft.integrations.sglang.refusals import refused_recomputation, refused_server
from kvgraft.integrations.sglang.reporting.reports import RequestLog, SampleSink
from kvgraft.integrations.sglang.requests.books import Books
from kvgraft.integrations.sglang.requests.decisions import LoadDecisions
from kvgraft.integrations.sglang.requests.ends import Ends
from kvgraft.integrations.sglang.requests.loading import Loading
from kvgraft.integrations.sglang.requests.passes import PolicyPasses
from kvgraft.integrations.sglang.requests.promises import Promises
from kvgraft.integrations.sglang.requests.publishing import Publishing
from kvgraft.integrations.sglang.requests.repairs import Repairs
from kvgraft.integrations.sglang.reuse import RequestReuse
from kvgraft.integrations.sglang.rope import read_rope
from kvgraft.integrations.sglang.status import state_directory, write_status
from kvgraft.integrations.sglang.versions import drift, installed_version, missing_hooks, untested_patch
from kvgraft.memory.configured import configured_stores
from kvgraft.types import RepairTime

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvgraft.config.sources import Resolved
    from kvgraft.graft.rope import RopeSpec
    from kvgraft.integrations.sglang.donors.tree import DonorTree
    from kvgraft.integrations.sglang.planning.substitutes import TreeSubstitutes
    from kvgraft.integrations.sglang.requests.store_use import StoreUse
    from kvgraft.memory.store.layout import RowLayout

logger = logging.getLogger(__name__)

_PHASE_TOKENS = {"cpu": 96, "cuda": 256}
"""Computed tokens that one more small forward pass costs.

On a CPU measured here (docs/benchmarks.md); on a GPU the ratio of arithmetic to memory bandwidth, 2 * 295 FLOP per byte of an
H100 in bf16, within which a pass over few tokens takes the time of reading the weights. Not measured on a GPU.
"""

_NAMES = {"_name_or_path", "_commit_hash", "transformers_version"}
"""Entries of a model's config that say where it comes from, not how it computes."""


def build_cache(ctx: Any) -> Any:  # noqa: ANN401 - TreeCacheBuildContext -> BasePrefixCache
    """Build SGLang's cache with reuse, or, where a reason speaks against reuse, the one that SGLang would build itself.

    Raises:
        IntegrationError: This SGLang is not what the adapter was written for, or its hooks were not applied.
        ConfigError: A setting is wrong.
    """
    resolved = resolve(SGLangConfig)
    config = resolved.config
    problems = [*drift(), *missing_hooks()]
    if problems:
        raise IntegrationError(f"SGLang {installed_version()} has changed: {'; '.join(problems)}")
    for remark in (*resolved.warnings, *_patch_warnings()):
        logger.warning("kvgraft: %s", remark)
    reason = refused_server(ctx) or _refused_provider(ctx, config)
    rope: Sequence[RopeSpec] = ()
    if reason is None:
        try:
            rope = _rope(ctx)
        except ModelError as error:
            reason = str(error)
    if reason is None and config.announce_donors and ctx.tp_rank == 0:
        from kvgraft.integrations.sglang.donor_events import require_events

        require_events(are_published=bool(ctx.params.enable_kv_cache_events))
    if reason is None:
        config = _possible(resolved, refused_recomputation(ctx))
    _announce(ctx, config, reason)
    if reason is None:
        _remark_on_chunks(ctx)
    if reason is not None:
        from sglang.srt.mem_cache.registry import default_radix_cache_factory

        _metrics(ctx, config, is_refused=True)
        return default_radix_cache_factory(ctx)
    return _grafting_cache(ctx, config, rope)


def _grafting_cache(ctx: Any, config: SGLangConfig, rope: Sequence[RopeSpec]) -> Any:  # noqa: ANN401
    from sglang.srt.mem_cache.registry import create_unified_radix_cache

    from kvgraft.integrations.sglang.cache import GraftRadixCache, SGLangTree

    cache = create_unified_radix_cache(ctx, cache_class=GraftRadixCache)
    assert isinstance(cache, GraftRadixCache)
    tree, buffers = SGLangTree(cache), _kv_buffers(ctx, rope)
    group = _group(ctx)
    secret = new_secret() if group is None else shared_secret(group)
    keeper = DonorKeeper(tree, buffers, config, secret=secret)
    page_size = int(cache.page_size)
    width = ctx.model_config.hf_text_config.hidden_size
    ranks = Ranks() if group is None else TensorParallelRanks(group, keeper.catalogue.get)
    per_phase = _phase_tokens(config, buffers)
    recomputer = _recomputer(ctx, config, buffers, ranks, per_phase)
    costs = CostModel.of_width(
        width,
        per_phase=per_phase,
        recompute_ratio=0.0 if recomputer is None else recomputer.policy.recompute_ratio,
    )
    fingerprint = _fingerprint(ctx, rope)
    log = RequestLog(_metrics(ctx, config), config.report_file, is_first_rank=ctx.tp_rank == 0)
    weights, layout = partial(_weights, ctx, fingerprint), buffers.row_layout()
    stores = _stores(config, keeper, ranks, costs, log=log, layout=layout, weights=weights)
    # Clocks of ranks differ, and their lookups must not.
    planner = LoadPlanner(
        keeper,
        config,
        costs,
        page_size,
        recomputer=recomputer,
        stores=None if stores is None else stores.link,
        has_deadline=ctx.tp_size == 1,
    )
    continuations = Continuations(tree, page_size, config.min_run, buffers.num_slots)
    books = Books(
        keeper=keeper,
        continuations=continuations,
        request_texts=RequestTexts(tree, keeper, continuations, min_run=config.min_run),
        ranks=ranks,
        log=log,
        stores=stores,
    )
    loader = Loader(tree, buffers, keeper, continuations, ranks=ranks, log=log)
    reuse = _request_reuse(
        ctx, config, books, planner, loader, passes=PolicyPasses(log, recomputer), fingerprint=fingerprint
    )
    if config.announce_donors and ctx.params.enable_kv_cache_events:
        from kvgraft.integrations.sglang.donor_events import DonorEvents

        cache.donor_events = DonorEvents(keeper.catalogue, fingerprint)
    reuse.open_stores()
    cache.attach(reuse)
    return cache


def _stores(
    config: SGLangConfig,
    keeper: DonorKeeper,
    ranks: Ranks,
    costs: CostModel,
    *,
    log: RequestLog,
    layout: RowLayout,
    weights: Callable[[], str],
) -> StoreUse | None:
    """Return the use of the configured stores; nothing of that is imported where there are none."""
    opened = configured_stores(config.store)
    if not opened:
        return None
    from kvgraft.integrations.sglang.requests.store_use import StoreUse
    from kvgraft.integrations.sglang.stored.link import StoreLink

    link = StoreLink(opened, keeper, ranks, layout=layout, costs=costs, weights=weights, host_bytes=config.host_bytes)
    return StoreUse(link, log, time.monotonic)


def _request_reuse(
    ctx: Any,  # noqa: ANN401
    config: SGLangConfig,
    books: Books,
    planner: LoadPlanner,
    loader: Loader,
    *,
    passes: PolicyPasses,
    fingerprint: str,
) -> RequestReuse:
    substitutes = _substitutes(ctx, config, loader.tree, books.continuations.page_size)
    repairs = Repairs(books, passes, refused_recomputation(ctx) or "", below_margin=config.repair_below_margin)
    publishing = Publishing(books, repairs, substitutes)
    promises = Promises(
        books=books,
        decisions=LoadDecisions(books, planner, substitutes),
        repairs=repairs,
        publishing=publishing,
        fingerprint=fingerprint,
        repair_time=RepairTime(config.repair),
    )
    return RequestReuse(
        books=books,
        promises=promises,
        loading=Loading(books, loader, config.min_run),
        repairs=repairs,
        publishing=publishing,
        ends=Ends(books, repairs, planner.policy.name),
    )


def _weights(ctx: Any, fingerprint: str) -> str:  # noqa: ANN401
    """Digest the weights as they are now; how the model computes with them is in `fingerprint`."""
    return weights_digest(ctx.tp_worker.model_runner.model.state_dict().items()) + fingerprint


def _possible(resolved: Resolved[SGLangConfig], refusal: str | None) -> SGLangConfig:
    """Return the settings of a server that refuses passes of our own, if it does, for the reason `refusal`.

    Raises:
        ConfigError: What needs such passes was asked for.
    """
    config = resolved.config
    if refusal is None:
        return config
    selection, correction, policy = config.selection, config.correction, chosen_policy(config)
    if policy.is_scattered:
        selection = _instead(resolved, "selection", selection, "first_k", refusal)
    if correction != "none" and not isinstance(policy, NoRecompute):
        correction = _instead(resolved, "correction", correction, "none", refusal)
    return replace(config, selection=selection, correction=correction)


def _instead(resolved: Resolved[SGLangConfig], name: str, value: str, possible: str, refusal: str) -> str:
    problem = f"{name}={value} needs forward passes of kvgraft's own, which do not go with {refusal}"
    if resolved.origins[name] != "default":
        raise ConfigError(f"{problem}; use {name}={possible}")
    logger.warning("kvgraft: %s; %s=%s is used", problem, name, possible)
    return possible


def _recomputer(ctx: Any, config: SGLangConfig, buffers: KVBuffers, ranks: Ranks, per_pass: float) -> Recomputer | None:  # noqa: ANN401
    policy = chosen_policy(config)
    if isinstance(policy, NoRecompute) or refused_recomputation(ctx) is not None:
        return None
    return Recomputer(
        SGLangRows(ctx.tp_worker.model_runner.model, buffers.device),
        buffers,
        policy,
        drift_correction(config.correction),
        ranks,
        FirstK(config.first_k),
        per_pass,
        share=expected_share(policy),
    )


def _remark_on_chunks(ctx: Any) -> None:  # noqa: ANN401
    """Say once what is not copied where SGLang computes prompts in one piece: copies are loaded between pieces."""
    size = getattr(ctx.server_args, "chunked_prefill_size", None)
    if ctx.tp_rank == 0 and size is not None and size <= 0:
        logger.warning(
            "kvgraft: with --chunked-prefill-size %d only text right after the exact prefix is copied, nothing after a new "
            "head; leave it out, or give a size above 0, to have more copied",
            size,
        )


def _patch_warnings() -> list[str]:
    found = installed_version() or ""
    patch = untested_patch(found)
    return [] if patch is None else [f"SGLang {found} is {patch}"]


def _refused_provider(ctx: Any, config: SGLangConfig) -> str | None:  # noqa: ANN401
    if config.semantic_provider and ctx.tp_size > 1:
        return "a semantic provider with tensor parallelism: ranks could get different answers"
    return None


def _rope(ctx: Any) -> Sequence[RopeSpec]:  # noqa: ANN401
    pool = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    return read_rope(ctx.tp_worker.model_runner.model, pool.layer_num, torch.device(pool.device))


def _kv_buffers(ctx: Any, rope: Sequence[RopeSpec]) -> KVBuffers:  # noqa: ANN401
    pool = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    layers = range(pool.start_layer, pool.start_layer + pool.layer_num)
    is_gpu = torch.device(pool.device).type == "cuda"
    return KVBuffers(
        [pool.get_key_buffer(layer) for layer in layers],
        [pool.get_value_buffer(layer) for layer in layers],
        rope,
        ctx.tp_worker.model_runner.forward_stream if is_gpu else None,
    )


def _phase_tokens(config: SGLangConfig, buffers: KVBuffers) -> float:
    return config.phase_cost_tokens or _PHASE_TOKENS.get(buffers.device.type, _PHASE_TOKENS["cuda"])


def _group(ctx: Any) -> Any:  # noqa: ANN401
    """Return the CPU process group of the ranks that serve a request together, or None for one rank."""
    return None if ctx.tp_size == 1 else ctx.params.attn_tp_cache_group or ctx.params.tp_cache_group


def _metrics(ctx: Any, config: SGLangConfig, *, is_refused: bool = False) -> SampleSink | None:  # noqa: ANN401
    if not ctx.params.enable_metrics or ctx.tp_rank != 0:
        return None
    from kvgraft.integrations.sglang.reporting.metrics import SGLangMetrics

    name = ctx.server_args.served_model_name or ctx.server_args.model_path
    return SGLangMetrics(name, config.host_bytes, is_refused=is_refused)


def _substitutes(ctx: Any, config: SGLangConfig, tree: DonorTree, page_size: int) -> TreeSubstitutes | None:  # noqa: ANN401
    """Return what names other texts; nothing of that is imported where no provider is set."""
    if not config.semantic_provider:
        return None
    from kvgraft.integrations.sglang.planning.substitutes import TreeSubstitutes
    from kvgraft.reuse.substitute import Substitutes

    return TreeSubstitutes(Substitutes.configured(config, ctx.model_config), tree, page_size)


def _fingerprint(ctx: Any, rope: Sequence[RopeSpec]) -> str:  # noqa: ANN401
    """Digest how the model computes, not where it lies: replicas share stores, and weights name the spaces of these."""
    config = ctx.model_config
    facts = {
        "dtype": str(config.dtype),
        "quantization": str(config.quantization),
        "config": _without_names(config.hf_config.to_dict()),
    }
    digest = hashlib.blake2b(digest_size=16, person=b"kvgraft.sglang")
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    for spec in {id(spec): spec for spec in rope}.values():
        digest.update(spec.inv_freq.cpu().numpy().tobytes() + spec.pairing.value.encode())
    return digest.hexdigest()


def _without_names(config: Any) -> Any:  # noqa: ANN401
    """Return a config, and those inside of it, without entries that do not change how a model computes."""
    if not isinstance(config, dict):
        return config
    return {str(name): _without_names(value) for name, value in config.items() if name not in _NAMES}


def _announce(ctx: Any, config: SGLangConfig, reason: str | None) -> None:  # noqa: ANN401
    """Say in the log and in a file that the backend is live in this process, or why reuse is off."""
    pool = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    facts: dict[str, object] = {
        "kvgraft": __version__,
        "sglang": installed_version(),
        "model": ctx.model_config.model_path,
        "tp_rank": ctx.tp_rank,
        "page_size": ctx.params.page_size,
        "dtype": str(getattr(pool, "dtype", "?")).removeprefix("torch."),
        "selection": config.selection,
        "correction": config.correction,
        "repair": config.repair,
    }
    words = " ".join(f"{name}={value}" for name, value in facts.items())
    if reason is None:
        logger.info("kvgraft is live in this scheduler: %s", words)
    else:
        logger.warning("kvgraft serves this model without reuse: %s (%s)", reason, words)
    try:
        write_status(state_directory(config.state_dir), {**facts, "refusal": reason})
    except OSError as error:
        logger.warning("kvgraft doctor will not see this process: %s", error)
