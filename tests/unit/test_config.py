"""Settings: values, sources, precedence, the command that shows them."""

from __future__ import annotations

import dataclasses
import json
import re
import tracemalloc

import pytest

from kvgraft.cli import main
from kvgraft.config import (
    EngineConfig,
    ReuseSettings,
    ServerConfig,
    SGLangConfig,
    VLLMConfig,
    file_errors,
    grouped_settings,
    resolve,
    variables,
)
from kvgraft.donors import GRAM_TOKENS, DonorCatalogue
from kvgraft.donors.catalogue import BYTES_PER_TOKEN
from kvgraft.errors import ConfigError
from kvgraft.graft.drift import CORRECTIONS
from kvgraft.graft.select import Observable, selection_policy
from kvgraft.prefix import EVICTION_POLICIES
from kvgraft.reuse.policy import available_policies


@pytest.fixture
def write(tmp_path):
    def write_file(text, name="server.yaml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write_file


def test_there_are_few_settings():
    # Three are for browsers and TLS, which the engine cannot find out; tool_parser because templates do not always tell.
    # Two say where traces go, which nobody but the user knows; two open a page, and to whom. Four are what a semantic
    # provider is made with: which text is near enough, and what that may cost, is the users' to say. One lets messages write
    # control tokens, for clients that render turns themselves; one is how long proxies stand a silent stream. Three say when
    # the policy's choice is computed, which trades the first token's fidelity against its time.
    assert len(ServerConfig.rules()) <= 64


def test_environment_sets_typed_values():
    config = EngineConfig.from_dict(
        variables(EngineConfig, {"KVGRAFT_NUM_SLOTS": "128", "KVGRAFT_RECOMPUTE_RATIO": "0.2", "OTHER": "1"})
    )
    assert (config.num_slots, config.recompute_ratio) == (128, 0.2)


def test_engine_ignores_variables_of_the_server():
    assert variables(EngineConfig, {"KVGRAFT_PORT": "1"}) == {}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_slot": 1}, "unknown setting 'num_slot'; did you mean 'num_slots'"),
        ({"zzz": 1}, "unknown setting 'zzz'; known are announce_donors, api_key, "),
        ({"num_slots": "many"}, "num_slots must be a whole number, not 'many'"),
        ({"num_slots": "1.5"}, "whole number"),
        ({"num_slots": 1.5}, "whole number, not 1.5"),
        ({"num_slots": True}, "whole number, not True"),
        ({"num_slots": None}, "whole number, not nothing"),
        ({"num_slots": [1]}, "whole number"),
        ({"num_slots": "9" * 5000}, "whole number"),
        ({"num_slots": -1}, "at least 0"),
        ({"num_slots": "4GiB"}, "whole number"),
        ({"kv_bytes": "4XB"}, "whole number or a size such as 4GiB"),
        ({"recompute_ratio": 0.0}, "recompute_ratio must be above 0"),
        ({"recompute_ratio": 1.1}, "at most 1"),
        ({"recompute_ratio": float("nan")}, "must be a number, not nan"),
        ({"recompute_ratio": "inf"}, "must be a number"),
        ({"recompute_ratio": True}, "must be a number, not True"),
        ({"stream_slowdown": 0}, "above 0"),
        ({"min_run": 4}, "at least 16"),
        ({"dtype": "int3"}, "unknown dtype 'int3'; choose auto, float32"),
        ({"dtype": 16}, "must be text"),
        ({"device": "gpu 1"}, "choose auto, cpu, cuda"),
        ({"selection": "best"}, "choose none, random, first_k"),
        ({"attention": "fast"}, "choose auto, sdpa, flex"),
        ({"reuse": "yes"}, "choose off, exact, graft, verified"),
        ({"log_format": "xml"}, "choose text, json"),
        ({"port": 65_536}, "at most 65535"),
        ({"port": "tcp://10.0.0.1:80"}, "whole number"),
        ({"host": ""}, "host must not be empty"),
        ({"model": ""}, "model must not be empty"),
        ({"max_body_bytes": 0}, "at least 1"),
        ({"shutdown_grace_s": -1}, "at least 0"),
        ({"api_key": ""}, "leave it out for none"),
        ({"api_key": "a,,b"}, "not empty"),
        ({"api_key": ["a b"]}, "without blanks"),
        ({"api_key": [1]}, "a text or a list of texts"),
        ({"page_size": 0}, "page_size must be at least 1"),
        ({"page_size": 1 << 17}, "at most 65536"),
        ({"eviction_policy": "best"}, "unknown eviction_policy 'best'; choose fifo, filo, lfu, lru"),
        (
            {"eviction_policy_config": "{"},
            "eviction_policy_config must be a JSON object such as {\"name\": 1}, not '{'",
        ),
        ({"eviction_policy_config": "[1]"}, "must be a JSON object"),
        ({"eviction_policy_config": 3}, "must be a JSON object"),
        ({"eviction_policy_config": '{"a": NaN}'}, "must be a JSON object"),
        ({"radix_cache_options": {"a": {1}}}, "must be a JSON object"),
        ({"radix_cache_options": '{"a": ' * 9000}, "must be a JSON object"),
        ({"kv_events": "5557"}, "unknown kv_events '5557'; choose tcp://*:PORT"),
        ({"kv_events": "http://*:5557"}, "unknown kv_events"),
    ],
)
def test_bad_value_is_refused_in_one_line(values, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        ServerConfig.from_dict(values)
    assert "\n" not in str(error.value)


def test_refused_key_is_not_told():
    with pytest.raises(ConfigError) as error:
        ServerConfig.from_dict({"api_key": {"my-secret": 1}})
    assert "my-secret" not in str(error.value)


def test_values_given_in_code_are_held_to_the_same_rules():
    with pytest.raises(ConfigError, match="at least 16"):
        EngineConfig(min_run=1)


@pytest.mark.parametrize(
    ("values", "name", "expected"),
    [
        ({"kv_bytes": "2GiB"}, "kv_bytes", 2 << 30),
        ({"kv_bytes": " 512 MiB "}, "kv_bytes", 512 << 20),
        ({"recompute_ratio": 1}, "recompute_ratio", 1.0),
        ({"shutdown_grace_s": "0"}, "shutdown_grace_s", 0.0),
        ({"api_key": "a, b"}, "api_key", ("a", "b")),
        ({"api_key": ["a", "b"]}, "api_key", ("a", "b")),
        ({"api_key": []}, "api_key", ()),
        ({"device": "cuda:1"}, "device", "cuda:1"),
        ({"served_model_name": ""}, "served_model_name", ""),
        ({"eviction_policy_config": ""}, "eviction_policy_config", ""),
        (
            {"eviction_policy_config": {"protected_threshold": 3}},
            "eviction_policy_config",
            '{"protected_threshold": 3}',
        ),
        ({"radix_cache_options": '{"a":[1]}'}, "radix_cache_options", '{"a":[1]}'),
        ({"kv_events": "tcp://*:5557"}, "kv_events", "tcp://*:5557"),
        ({"kv_events": '{"endpoint": "ipc:///tmp/kv"}'}, "kv_events", '{"endpoint": "ipc:///tmp/kv"}'),
    ],
)
def test_value_is_read(values, name, expected):
    assert getattr(ServerConfig.from_dict(values), name) == expected


def test_key_is_not_in_the_repr():
    assert "hidden" not in repr(ServerConfig.from_dict({"api_key": "hidden"}))


def test_names_match_those_of_the_code_that_uses_them():
    from kvgraft.engine.attention.choose import ATTENTION_BACKENDS
    from kvgraft.engine.model.loading import DTYPES
    from kvgraft.server.options import SELECTIONS
    from kvgraft.types import ReuseMode

    rules = ServerConfig.rules()
    assert rules["dtype"].choices == ("auto", *DTYPES)
    assert rules["selection"].choices == SELECTIONS
    # Another text stands in for requests that ask for it themselves, never for those of a whole server.
    assert rules["reuse"].choices == tuple(mode for mode in ReuseMode if mode is not ReuseMode.SUBSTITUTE)
    assert rules["eviction_policy"].choices == tuple(EVICTION_POLICIES)
    assert set(rules["attention"].choices) == {"auto", *ATTENTION_BACKENDS}


class TestReuseSettings:
    """What engines share is there once; they differ where they must."""

    @pytest.mark.parametrize("kind", [EngineConfig, ServerConfig, VLLMConfig, SGLangConfig])
    def test_engines_say_the_same_of_a_shared_setting(self, kind):
        for name, rule in ReuseSettings.rules().items():
            assert dataclasses.replace(kind.rules()[name], choices=()) == dataclasses.replace(rule, choices=())

    def test_defaults_differ_only_where_it_is_said_why(self):
        shared = {field.name: field.default for field in dataclasses.fields(ReuseSettings)}
        different = {
            (kind.__name__, name)
            for kind in (EngineConfig, VLLMConfig, SGLangConfig)
            for name, default in shared.items()
            if kind.field(name).default != default
        }
        assert different == {("VLLMConfig", "host_bytes")}

    @pytest.mark.parametrize(
        ("kind", "shown"),
        [
            (EngineConfig, set(Observable)),
            (VLLMConfig, {Observable.QUERY_ATTENTION, Observable.KEY_DEVIATION}),
            (SGLangConfig, {Observable.QUERY_ATTENTION}),
        ],
    )
    def test_choices_follow_from_what_an_engine_can_show(self, kind, shown):
        assert kind.rules()["selection"].choices == available_policies(shown)

    def test_all_engines_correct_drift(self):
        for kind in (EngineConfig, VLLMConfig, SGLangConfig):
            assert kind.rules()["correction"].choices == tuple(CORRECTIONS)

    def test_ratio_is_that_of_the_policy(self):
        assert ReuseSettings().recompute_ratio == selection_policy(ReuseSettings().selection).recompute_ratio

    def test_shortest_run_is_that_of_the_index(self):
        assert ReuseSettings().min_run == GRAM_TOKENS == ReuseSettings.rules()["donor_tokens"].low

    def test_memory_per_donor_token_is_as_the_catalogue_takes(self):
        for tokens in (100_000, 3 << 16, 1 << 18, (1 << 18) + 16):
            tracemalloc.start()
            catalogue = DonorCatalogue(tokens)
            taken = tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
            assert BYTES_PER_TOKEN / 4 < taken / catalogue.capacity_tokens < BYTES_PER_TOKEN


class TestPrecedence:
    def test_flags_win_over_environment_over_file_over_defaults(self, write):
        file = write("port: 1\nhost: ::1\nreuse: exact\n")
        environ = {"KVGRAFT_PORT": "2", "KVGRAFT_HOST": "::2", "KVGRAFT_CONFIG": "unused"}
        resolved = resolve(ServerConfig, {"port": "3"}, file, environ)
        config = resolved.config
        assert (config.port, config.host, config.reuse, config.log_format) == (3, "::2", "exact", "text")
        origins = [resolved.origins[name] for name in ("port", "host", "reuse", "log_format")]
        assert origins == ["--port", "KVGRAFT_HOST", file, "default"]

    def test_variable_names_the_file_where_no_flag_does(self, write):
        assert resolve(ServerConfig, {}, None, {"KVGRAFT_CONFIG": write("port: 7")}).config.port == 7

    @pytest.mark.parametrize(
        ("flags", "environ", "beginning"),
        [
            ({"max_model_len": "x"}, {}, "--max-model-len: max_model_len must be"),
            ({}, {"KVGRAFT_PORT": "x"}, "KVGRAFT_PORT: port must be"),
        ],
    )
    def test_error_begins_with_where_the_value_came_from(self, flags, environ, beginning):
        with pytest.raises(ConfigError, match=f"^{beginning}"):
            resolve(ServerConfig, flags, None, environ)

    def test_misspelt_variable_is_refused(self):
        with pytest.raises(ConfigError, match=r"^KVGRAFT_MAX_RUNING is no setting; did you mean KVGRAFT_MAX_RUNNING\?"):
            resolve(ServerConfig, {}, None, {"KVGRAFT_MAX_RUNING": "1", "KVGRAFT_CONFIG": ""})

    def test_setting_of_file_and_variable_is_told_without_its_value(self, write):
        file = write("api_key: first")
        warnings = resolve(ServerConfig, {}, file, {"KVGRAFT_API_KEY": "second"}).warnings
        assert warnings == (f"KVGRAFT_API_KEY is taken instead of api_key in {file}",)


class TestFiles:
    @pytest.mark.parametrize(
        ("text", "name"), [("", "a.yaml"), ("# nothing\n", "a.yml"), ("", "a.json"), ("{}", "a.json")]
    )
    def test_empty_file_is_all_defaults(self, write, text, name):
        assert resolve(ServerConfig, {}, write(text, name), {}).config == ServerConfig()

    def test_json_is_read(self, write):
        assert resolve(ServerConfig, {}, write('{"port": 5, "api_key": ["k"]}', "a.JSON"), {}).config.port == 5

    def test_a_bare_off_of_yaml_is_the_word(self, write):
        config = resolve(ServerConfig, {}, write("reuse: off\nheal: off\nui: off\n"), {}).config
        assert (config.reuse, config.heal, config.ui) == ("off", "off", False)

    def test_yaml_keys_may_be_a_list(self, write):
        assert resolve(ServerConfig, {}, write("api_key:\n  - a\n  - b\n"), {}).config.api_key == ("a", "b")

    @pytest.mark.parametrize(
        ("text", "name", "words"),
        [
            ("port: [", "a.yaml", "line 1 is not valid YAML"),
            ("port: 1\nport: 2", "a.yaml", "given twice"),
            ("- port", "a.yaml", "must hold settings"),
            ("just text", "a.yaml", "must hold settings"),
            ("1: 2", "a.yaml", "unknown setting 1"),
            ("prot: 1", "a.yaml", "did you mean 'port'"),
            ("port: yes", "a.yaml", "whole number, not True"),
            ("reuse: on", "a.yaml", "must be text, not True"),
            ("dtype: off", "a.yaml", "must be text, not False"),
            ("port:", "a.yaml", "not nothing"),
            ("recompute_ratio: .nan", "a.yaml", "must be a number"),
            ("model: 2024-01-01", "a.yaml", "must be text"),
            ("port: !!python/object:os.system 1", "a.yaml", "not valid YAML"),
            ("[" * 2_000, "a.yaml", "not valid YAML"),
            ("{", "a.json", "not valid JSON"),
            ('{"port": 1, "port": 2}', "a.json", "given twice"),
            ("[" * 100_000, "a.json", "not valid JSON"),
        ],
    )
    def test_wrong_file_is_one_line(self, write, text, name, words):
        (error,) = file_errors(write(text, name))
        assert words in error
        assert "\n" not in error

    def test_file_that_is_not_there_is_named(self):
        assert "no-such.yaml" in file_errors("no-such.yaml")[0]

    def test_file_that_is_no_text_is_refused(self, tmp_path):
        path = tmp_path / "a.yaml"
        path.write_bytes(b"\xff\xfe")
        assert "UTF-8" in file_errors(str(path))[0]

    def test_every_error_is_told(self, write):
        assert len(file_errors(write("port: x\nprot: 1\nhost: h\nmin_run: 1\n"))) == 3


class TestCommand:
    @pytest.fixture(autouse=True)
    def _bare_environment(self, monkeypatch):
        for name in ServerConfig.rules():
            monkeypatch.delenv("KVGRAFT_" + name.upper(), raising=False)
        monkeypatch.delenv("KVGRAFT_CONFIG", raising=False)

    def run(self, capsys, *argv):
        code = main(["config", *argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    def test_show_prints_values_and_origins(self, capsys, monkeypatch, write):
        monkeypatch.setenv("KVGRAFT_API_KEY", "hidden,second")
        code, out, _ = self.run(capsys, "show", "--config", write("reuse: exact"), "--port", "0", "--format", "json")
        shown = json.loads(out)
        assert code == 0
        assert list(shown) == [field.name for fields in grouped_settings().values() for field in fields]
        assert set(shown) == set(ServerConfig.rules())
        assert shown["port"] == {"value": 0, "from": "--port"}
        assert shown["api_key"] == {"value": ["***", "***"], "from": "KVGRAFT_API_KEY"}
        assert shown["reuse"]["from"].endswith("server.yaml")
        assert "hidden" not in out

    def test_show_prints_yaml_that_can_be_read_again(self, capsys, write):
        _, out, _ = self.run(capsys, "show", "--kv-bytes", "2GiB", "--host", "::1")
        assert re.search(r'^host: "::1" +# --host$', out, re.MULTILINE)
        config = resolve(ServerConfig, {}, write(out), {}).config
        assert (config.kv_bytes, config.host) == (2 << 30, "::1")

    def test_show_changed_prints_what_differs_from_its_default_alone(self, capsys, monkeypatch, write):
        monkeypatch.setenv("KVGRAFT_API_KEY", "hidden")
        given = ("--config", write("reuse: exact"), "--port", "9000", "--host", "127.0.0.1")  # the last as by default
        _, out, _ = self.run(capsys, "show", "--changed", "--format", "json", *given)
        shown = json.loads(out)
        assert set(shown) == {"reuse", "port", "api_key"}
        assert shown["port"] == {"value": 9000, "from": "--port"}
        assert shown["api_key"] == {"value": ["***"], "from": "KVGRAFT_API_KEY"}
        assert shown["reuse"]["from"].endswith("server.yaml")
        _, out, _ = self.run(capsys, "show", "--changed", *given)
        assert [line.partition(":")[0] for line in out.splitlines()] == list(shown)
        config = resolve(ServerConfig, {}, write(out.replace("***", "key")), {}).config
        assert (config.reuse, config.port) == ("exact", 9000)

    def test_show_changed_says_that_nothing_is(self, capsys):
        assert self.run(capsys, "show", "--changed") == (0, "# every setting has its default\n", "")
        assert self.run(capsys, "show", "--changed", "--format", "json") == (0, "{}\n", "")

    def test_show_refuses_in_one_line(self, capsys):
        code, out, err = self.run(capsys, "show", "--port", "99999")
        assert (code, out) == (2, "")
        assert err == "kvgraft: --port: port must be at most 65535, not 99999\n"

    def test_validate_says_ok(self, capsys, write):
        file = write("port: 5")
        assert self.run(capsys, "validate", file) == (0, f"{file}: ok\n", "")

    def test_validate_prints_a_line_per_error(self, capsys, write):
        code, out, err = self.run(capsys, "validate", write("port: x\nprot: 1"))
        assert (code, out) == (2, "")
        assert [line.startswith("kvgraft: ") for line in err.splitlines()] == [True, True]


def test_serve_help_explains_itself(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help-all"])
    out = capsys.readouterr().out
    for words in ("example:", "reuse:", "memory:", "scheduling:", "server:", "--port N", "KVGRAFT_API_KEY"):
        assert words in out
    for name in ServerConfig.rules():
        assert "--" + name.replace("_", "-") in out
