"""Plans: phases that pay, deadlines, namespaces that cannot run into one another."""

from __future__ import annotations

import itertools
from array import array

import pytest

from kvgraft.config import SGLangConfig, resolve
from kvgraft.donors import CostModel
from kvgraft.errors import ConfigError
from kvgraft.integrations.sglang.donors.texts import Origin, TreeText
from kvgraft.integrations.sglang.planning.planner import LoadPlanner, extent, request_namespace
from kvgraft.integrations.sglang.planning.regions import loadable
from kvgraft.reuse.policy import configured_policy
from kvgraft.types import DonorId, Fidelity, GraftPlan, Match, MissReason


def plan(world, tokens, prefix_len=0, phase_tokens=1.0, **settings):
    config = SGLangConfig(**{"selection": "none", "donor_tokens": 1 << 15, "lookup_deadline_ms": 1e9, **settings})
    planner = LoadPlanner(world.keeper, config, CostModel.of_width(64, per_phase=phase_tokens, recompute_ratio=0.0), 1)
    return planner.plan(request_namespace("model", None, None, None), tokens, prefix_len, len(tokens) - 1)


def spans(found):
    return [(region.start, region.length) for region in found.spans]


def test_regions_that_save_less_than_a_phase_are_computed(make_world, make_tokens):
    world, document = make_world(), make_tokens(300)
    world.publish("donor", document)
    prompt = document[:60] + make_tokens(20) + document[100:140] + make_tokens(20) + document[200:290] + make_tokens(9)
    assert spans(plan(world, prompt, phase_tokens=1)) == [(0, 60), (80, 40), (140, 90)]
    assert spans(plan(world, prompt, phase_tokens=64)) == [(0, 60), (140, 90)]
    assert spans(plan(world, prompt, phase_tokens=4096)) == [(0, 60)]


def test_phase_cost_counts_from_the_exact_prefix(make_world, make_tokens):
    world, document = make_world(), make_tokens(300)
    world.publish("donor", document)
    prompt = make_tokens(50) + document[:60] + make_tokens(9)
    assert spans(plan(world, prompt, 50, phase_tokens=4096)) == [(50, 60)]
    assert plan(world, prompt, 49, phase_tokens=4096).miss.reason is MissReason.NOT_WORTH_IT


def test_misses_have_reasons(make_world, make_tokens):
    world = make_world()
    assert plan(world, make_tokens(50)).miss.reason is MissReason.NO_DONORS
    world.publish("donor", make_tokens(50))
    assert plan(world, make_tokens(50)).miss.reason is MissReason.NO_MATCH


def test_first_k_is_part_of_the_plan(make_world, make_tokens):
    world, document = make_world(), make_tokens(100)
    world.publish("donor", document)
    found = plan(world, document[1:81] + make_tokens(5), selection="first_k", first_k=10)
    assert spans(found) == [(10, 70)]
    assert [span.recomputed for span in found.spans] == [10]


def test_nothing_of_an_exact_front_is_left_to_compute(make_world, make_tokens):
    world, document, moved = make_world(), make_tokens(100), make_tokens(100)
    world.publish("donor", document)
    world.publish("other", moved)
    prompt = document[:80] + make_tokens(5) + moved[10:] + make_tokens(5)
    found = plan(world, prompt, selection="first_k", first_k=10)
    assert spans(found) == [(0, 80), (95, 80)]
    assert [(span.fidelity, span.recomputed) for span in found.spans] == [(Fidelity.EXACT, 0), (Fidelity.SHIFTED, 10)]
    assert [span.report().fidelity for span in found.spans] == [Fidelity.EXACT, Fidelity.SHIFTED]
    assert extent(GraftPlan.over(len(prompt), 0, [span.match for span in found.spans])) == (80, 5)


def test_later_turns_are_exact_wherever_their_k_v_went(make_world, make_tokens):
    """What was registered of the tree from position 100 on says what stood in front of it, in host memory, too."""
    world, conversation = make_world(), make_tokens(180)
    prompt = conversation + make_tokens(20)
    text = TreeText(conversation, request_namespace("model", None, None, None), None, None, 0, 0, Origin("turn"))
    slots = world.tree.allocate(180)
    node = world.tree.insert(conversation, slots)
    world.keeper.register(text, 100, slots[100:].numpy())
    for is_evicted in (False, True):
        if is_evicted:
            world.tree.evict(node, 0)
            plan(world, prompt)  # whereupon the keeper knows it
        (span,) = plan(world, prompt).spans
        assert (span.start, span.length, span.fidelity) == (100, 80, Fidelity.EXACT)
        changed = array("q", [conversation[0] ^ 1]) + prompt[1:]
        assert [span.fidelity for span in plan(world, changed).spans] == [Fidelity.SHIFTED]
    assert world.keeper.host_bytes


def test_exact_text_of_a_store_may_stand_behind_a_copy_at_hand():
    """Donors at hand go first, so that of a longer exact front in a store the rest alone may be read."""
    copied, exact = Match(0, DonorId(1), 50, 100), Match(100, DonorId(2), 100, 60, fidelity=Fidelity.EXACT)
    policy = configured_policy("first_k", first_k=10, recompute_ratio=0.0, shown=frozenset())
    regions, recomputed = loadable([copied, exact], start=0, end=200, page_size=1, policy=policy, min_run=16)
    assert [(part.target_start, part.target_end, part.is_exact) for part in regions] == [
        (10, 100, False),
        (100, 160, True),
    ]
    assert recomputed == {10: 10, 100: 0}
    plan_of_both = GraftPlan.over(201, 0, regions)
    assert (plan_of_both.settled_end, plan_of_both.has_shifted) == (0, True)


def test_lookup_that_would_take_too_long_is_not_begun_and_is_tried_again_later(make_world, make_tokens):
    world, document = make_world(), make_tokens(200)
    world.publish("donor", document)
    config = SGLangConfig(selection="none", donor_tokens=1 << 15, lookup_deadline_ms=20)
    costs = CostModel.of_width(64, per_phase=1, recompute_ratio=0.0)
    seconds = itertools.count(step=1)
    planner = LoadPlanner(world.keeper, config, costs, 1, clock=lambda: next(seconds))
    namespace, prompt = request_namespace("model", None, None, None), document + make_tokens(5)
    assert planner.plan(namespace, prompt, 0, 200).spans, "the first lookup measures"
    assert planner.plan(namespace, prompt, 0, 200).miss.reason is MissReason.DEADLINE
    assert any(planner.plan(namespace, prompt, 0, 200).spans for _ in range(200))
    ranks_agree = LoadPlanner(world.keeper, config, costs, 1, has_deadline=False, clock=lambda: next(seconds))
    assert all(ranks_agree.plan(namespace, prompt, 0, 200).spans for _ in range(3))


def test_namespaces_do_not_run_into_one_another():
    names = [None, "", "a", "b", "ab", '","', "null"]
    keys = {request_namespace("m", None, extra, salt).key for extra in names for salt in names}
    assert len(keys) == len(names) ** 2
    assert request_namespace("m", "l", None, None) != request_namespace("m", None, "l", None)


def test_settings_come_from_file_then_environment(tmp_path):
    path = tmp_path / "kvgraft.json"
    path.write_text('{"min_run": 32, "selection": "none", "host_bytes": "2GiB"}')
    environ = {"KVGRAFT_CONFIG": str(path), "KVGRAFT_MIN_RUN": "64", "OTHER": "1"}
    resolved = resolve(SGLangConfig, environ=environ)
    config = resolved.config
    assert (config.min_run, config.selection, config.host_bytes) == (64, "none", 2 << 30)
    assert resolved.warnings == (f"KVGRAFT_MIN_RUN is taken instead of min_run in {path}",)


def test_settings_of_other_engines_are_told():
    environ = {"KVGRAFT_LOAD": "sync", "KVGRAFT_NUM_SLOTS": "100", "KVGRAFT_MIN_RUN": "32"}
    assert resolve(SGLangConfig, environ=environ).warnings == (
        "KVGRAFT_NUM_SLOTS is ignored: it is a setting of kvgraft's own engine and server",
        "KVGRAFT_LOAD is ignored: it is a setting of the vLLM connector, which reads kv_connector_extra_config alone",
    )


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"KVGRAFT_MIN_RUN": "4"}, "KVGRAFT_MIN_RUN: min_run must be at least 16"),
        ({"KVGRAFT_SELECTION": "adaptive"}, "unknown selection 'adaptive'; choose none, random, first_k"),
        ({"KVGRAFT_SEMANTIC_PROVIDER": "no colon"}, "choose module:Class"),
        ({"KVGRAFT_CONFIG": "absent.json"}, "absent.json"),
        ({"KVGRAFT_MIN_RUNS": "32"}, "KVGRAFT_MIN_RUNS is no setting; did you mean KVGRAFT_MIN_RUN?"),
        ({"kvgraft_min_run": "32"}, "kvgraft_min_run is no setting; did you mean KVGRAFT_MIN_RUN?"),
    ],
)
def test_wrong_settings_say_where_they_came_from(environ, message):
    with pytest.raises(ConfigError, match=message):
        resolve(SGLangConfig, environ=environ)
