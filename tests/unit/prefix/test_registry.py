"""The registry of prefix caches: the behaviours of its specification, numbered as there."""

from __future__ import annotations

import dataclasses
from importlib.metadata import EntryPoint

import pytest

from kvgraft.errors import ConfigError, IntegrationError
from kvgraft.events import EventLog
from kvgraft.prefix import (
    ChunkCache,
    HierarchicalRadixCache,
    HierarchicalStateCache,
    RadixCache,
    StateRadixCache,
    StreamingSession,
    SWAChunkCache,
    SWARadixCache,
    TreeCacheBuildContext,
    create_tree_cache,
    default_radix_cache_factory,
    get_radix_cache_factory,
    register_radix_cache_backend,
    registered_radix_cache_backends,
    registry,
)


@pytest.fixture(autouse=True)
def _no_packages(monkeypatch):
    monkeypatch.setattr(registry, "entry_points", lambda group: [])


def context(**fields):
    return TreeCacheBuildContext(**fields)


def test_01_a_registered_factory_is_returned_and_listed():
    register_radix_cache_backend("mine", factory := lambda ctx: None)
    assert get_radix_cache_factory("mine") is factory
    assert registered_radix_cache_backends() == ["mine"]


def test_02_an_unknown_name_is_none():
    assert get_radix_cache_factory("nobody") is None


@pytest.mark.parametrize("name", ["", "  ", "\t"])
def test_03_04_empty_and_blank_names_are_refused(name):
    with pytest.raises(ConfigError, match="not empty"):
        register_radix_cache_backend(name, RadixCache)
    assert registered_radix_cache_backends() == []


def test_05_a_name_is_given_once():
    register_radix_cache_backend("mine", first := lambda ctx: None)
    with pytest.raises(ConfigError, match="'mine' is registered already"):
        register_radix_cache_backend("mine", lambda ctx: None)
    assert get_radix_cache_factory("mine") is first


def test_06_a_named_factory_is_called_once_and_its_cache_returned_as_is():
    calls, cache = [], RadixCache()
    register_radix_cache_backend("mine", lambda ctx: calls.append(ctx) or cache)
    ctx = context(backend="mine", options={"depth": 3})
    assert create_tree_cache(ctx) is cache
    assert calls == [ctx]


def test_07_an_unknown_backend_is_told_what_there_is():
    register_radix_cache_backend("mine", RadixCache)
    with pytest.raises(ValueError, match=r"unknown prefix-cache backend 'yours'; registered are: mine\. Call register"):
        create_tree_cache(context(backend="yours"))


def test_08_without_a_name_the_default_is_called_once(monkeypatch):
    calls, cache = [], RadixCache()
    monkeypatch.setattr(registry, "default_radix_cache_factory", lambda ctx: calls.append(ctx) or cache)
    assert create_tree_cache(ctx := context()) is cache
    assert calls == [ctx]


def test_09_a_cache_without_sessions_is_wrapped_where_they_are_asked_for():
    cache = create_tree_cache(context(enable_streaming_session=True))
    assert isinstance(cache, StreamingSession)
    assert isinstance(cache.inner, RadixCache)


def test_10_a_cache_with_sessions_is_not_wrapped():
    class WithSessions(RadixCache):
        def supports_streaming_session(self):
            return True

    cache = WithSessions()
    register_radix_cache_backend("mine", lambda ctx: cache)
    assert create_tree_cache(context(backend="mine", enable_streaming_session=True)) is cache


CHUNKS = {"effective_chunked_prefill_size": 512, "disable_radix_cache": True}
WINDOW = {"sliding_window_size": 128}


class Transfer:
    def backup(self, kv_indices):
        return None

    load = backup

    def free_host(self, host_indices):
        pass


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (CHUNKS, ChunkCache),  # 11
        ({**CHUNKS, "is_hybrid_swa": True, **WINDOW}, SWAChunkCache),  # 12
        ({**CHUNKS, "is_all_swa": True, **WINDOW}, SWAChunkCache),  # 13
        ({**CHUNKS, "use_native_tree": True}, ChunkCache),  # order: disabled comes first
        ({"use_unified_tree": True}, RadixCache),  # 15
        ({"use_unified_tree": True, "is_hybrid_swa": True, **WINDOW}, SWARadixCache),
        ({"enable_hierarchical_cache": True, "tier_transfer": Transfer()}, HierarchicalRadixCache),  # 16
        (
            {"enable_hierarchical_cache": True, "is_hybrid_ssm": True}
            | {"tier_transfer": Transfer(), "state_tier_transfer": Transfer()},
            HierarchicalStateCache,
        ),  # 17
        ({"is_hybrid_swa": True, **WINDOW}, SWARadixCache),  # 20
        ({"is_all_swa": True, **WINDOW}, SWARadixCache),  # 21
        ({"is_hybrid_ssm": True}, StateRadixCache),  # 22
        ({"use_unified_tree": True, "is_hybrid_ssm": True}, StateRadixCache),
        ({"is_hybrid_ssm": True, "is_hybrid_swa": True, "disable_radix_cache": True, **WINDOW}, StateRadixCache),
        ({}, RadixCache),  # 24
        ({"disable_radix_cache": True}, RadixCache),
        ({"effective_chunked_prefill_size": 512}, RadixCache),
    ],
)
def test_11_to_24_the_default_chain(fields, expected):
    cache = default_radix_cache_factory(context(page_size=16, **fields))
    assert type(cache) is expected
    assert cache.page_size == 16
    assert cache.disabled == fields.get("disable_radix_cache", False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_native_tree": True}, "no tree in native code"),  # 14
        ({"enable_hierarchical_cache": True, "is_hybrid_swa": True, **WINDOW}, "keeps windows on the host"),  # 18
        ({"enable_hierarchical_cache": True, "use_unified_tree": True}, "unset enable_hierarchical_cache"),
        (
            {"enable_hierarchical_cache": True, "is_hybrid_ssm": True, "is_hybrid_swa": True, **WINDOW},
            "no prefix cache keeps windows and states",
        ),
        (
            {"enable_hierarchical_cache": True, "is_hybrid_ssm": True, "tier_transfer": Transfer()},
            "needs state_tier_transfer",
        ),
        ({"is_hybrid_ssm": True, "is_hybrid_swa": True, **WINDOW}, "no prefix cache keeps windows and states"),
        ({"is_hybrid_ssm": True, "enable_streaming_session": True}, "session keeps no state"),
        ({"is_hybrid_ssm": True, "state_chunk_size": 0}, "state_chunk_size must be at least 1, not 0"),
        (
            {"is_hybrid_ssm": True, "enable_streaming_session": True}
            | {"disable_radix_cache": True, "effective_chunked_prefill_size": 512},
            "session keeps no state",
        ),
        ({"external_backend": "lmcache"}, "no external cache service 'lmcache'"),  # 23
        ({"is_hybrid_swa": True}, "needs sliding_window_size"),
        ({"enable_hierarchical_cache": True}, "needs tier_transfer"),
        ({"eviction_policy": "random"}, "unknown eviction policy 'random'"),
        ({"eviction_policy": "slru", "eviction_policy_config": {"x": 1}}, "no parameter 'x'"),
    ],
)
def test_what_does_not_exist_is_named(fields, message):
    with pytest.raises(ConfigError, match=message):
        default_radix_cache_factory(context(**fields))


def test_settings_reach_the_cache():
    cache = create_tree_cache(context(eviction_policy="slru", eviction_policy_config={"protected_threshold": 5}))
    assert dataclasses.asdict(cache.policy) == {"protected_threshold": 5}
    swa = create_tree_cache(context(is_hybrid_swa=True, sliding_window_size=77))
    assert swa.sliding_window_size == 77
    ssm = create_tree_cache(context(is_hybrid_ssm=True, page_size=16, state_chunk_size=64))
    assert (ssm.state_chunk_size, ssm.state_alignment) == (64, 64)
    tiers = {"tier_transfer": Transfer(), "state_tier_transfer": Transfer()}
    tiered = create_tree_cache(
        context(
            is_hybrid_ssm=True, enable_hierarchical_cache=True, state_chunk_size=8, events=(log := EventLog()), **tiers
        )
    )
    assert (tiered.transfer, tiered.state_transfer) == (tiers["tier_transfer"], tiers["state_tier_transfer"])
    assert tiered.state_chunk_size == 8
    assert not log.take()


def test_third_parties_come_through_entry_points(monkeypatch):
    entry = EntryPoint("theirs", "kvgraft.prefix.registry:default_radix_cache_factory", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    assert isinstance(create_tree_cache(context(backend="theirs")), RadixCache)
    assert registered_radix_cache_backends() == ["theirs"]
    create_tree_cache(context(backend="theirs"))


def test_an_entry_point_that_cannot_be_loaded_is_named(monkeypatch):
    entry = EntryPoint("broken", "kvgraft.nothing:factory", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    with pytest.raises(IntegrationError, match=r"'broken' .* cannot be loaded"):
        create_tree_cache(context(backend="broken"))


def offer(monkeypatch, *entries):
    made = [EntryPoint(name, value, registry.ENTRY_POINT_GROUP) for name, value in entries]
    monkeypatch.setattr(registry, "entry_points", lambda group: made)


WORKS = "kvgraft.prefix.registry:default_radix_cache_factory"


def test_a_broken_package_does_not_keep_others_from_being_used(monkeypatch):
    offer(monkeypatch, ("broken", "kvgraft.nothing:factory"), ("works", WORKS), ("bad", "kvgraft.prefix:__all__"))
    assert isinstance(create_tree_cache(context(backend="works")), RadixCache)
    assert registered_radix_cache_backends() == ["works"]


def test_broken_packages_are_warned_of_where_all_are_loaded(monkeypatch, caplog):
    offer(monkeypatch, ("broken", "kvgraft.nothing:factory"), ("bad", "kvgraft.prefix:__all__"), ("works", WORKS))
    with pytest.raises(ConfigError, match=r"unknown prefix-cache backend 'other'; registered are: works\."):
        create_tree_cache(context(backend="other"))
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == 2
    assert "'broken' (kvgraft.nothing:factory) cannot be loaded: ModuleNotFoundError" in warned[0]
    assert "'bad' (kvgraft.prefix:__all__) cannot be loaded: a list is no factory; it is skipped" in warned[1]


def test_of_two_packages_with_one_name_the_one_that_works_is_taken(monkeypatch):
    offer(monkeypatch, ("twice", "kvgraft.nothing:factory"), ("twice", WORKS))
    assert isinstance(create_tree_cache(context(backend="twice")), RadixCache)


def test_what_is_no_cache_is_refused():
    register_radix_cache_backend("wrong", lambda ctx: {})
    with pytest.raises(IntegrationError, match="'wrong' makes a dict; its factory must return a PrefixCache"):
        create_tree_cache(context(backend="wrong"))


def make_cache(ctx):
    """What users name as `module:make_cache`."""
    return RadixCache(ctx.page_size)


def fail(ctx):
    raise RuntimeError("no room")


def refuse(ctx):
    raise ConfigError("page_size must be 1; leave it out")


class TestImported:
    def test_a_factory_is_named_by_module_and_attribute(self):
        cache = create_tree_cache(context(backend=f"{__name__}:make_cache", page_size=16))
        assert isinstance(cache, RadixCache)
        assert cache.page_size == 16
        assert registered_radix_cache_backends() == []

    def test_a_registered_name_comes_first(self):
        cache = RadixCache()
        register_radix_cache_backend(f"{__name__}:make_cache", lambda ctx: cache)
        assert create_tree_cache(context(backend=f"{__name__}:make_cache")) is cache

    @pytest.mark.parametrize(
        ("name", "problem"),
        [
            ("no_such_module:make", "cannot be loaded: .*no_such_module"),
            ("json:not_there", "cannot be loaded: .*not_there"),
            ("json:__name__", "is a str; it must be a function that takes a TreeCacheBuildContext"),
            (f"{__name__}:fail", "cannot be built: .*no room"),
            ("builtins:print", "makes a NoneType; its factory must return a PrefixCache"),
        ],
    )
    def test_what_is_no_factory_is_one_line(self, name, problem):
        with pytest.raises(IntegrationError, match=problem):
            create_tree_cache(context(backend=name))

    def test_what_a_factory_says_of_its_settings_is_passed_on(self):
        with pytest.raises(ConfigError, match=r"^page_size must be 1; leave it out$"):
            create_tree_cache(context(backend=f"{__name__}:refuse"))
