"""Configuration: which layer wins, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from vlcache.config import Config, load_config
from vlcache.errors import ConfigError

OPTIONS = [f.name for f in dataclasses.fields(Config)]


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "vlcache.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def refusal(**arguments: Any) -> str:
    """What `load_config` says; nothing of this process's environment is read."""
    with pytest.raises(ConfigError) as caught:
        load_config(**({"environ": {}} | arguments))
    return str(caught.value)


def test_defaults() -> None:
    config = load_config({})
    assert config == Config()
    assert (config.policy, config.memory_gb, config.prefix_cache) == ("auto", 4.0, True)
    assert (config.max_image_pixels, config.cache_salt, config.checkpoint_layers) == (64_000_000, "", ())


def test_file_over_defaults_environment_over_file_arguments_over_all(tmp_path: Path) -> None:
    file = write(tmp_path, "memory_gb: 1\nprefix_gb: 1.5\ncache_salt: file\n")
    environ = {"VLCACHE_PREFIX_GB": "2.5", "VLCACHE_CACHE_SALT": "environment"}
    config = load_config(environ, file, cache_salt="argument")
    assert config == Config(memory_gb=1.0, prefix_gb=2.5, cache_salt="argument")


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_can_be_set_in_every_layer(tmp_path: Path, option: str) -> None:
    written, value = {
        "policy": ("full", "full"),
        "memory_gb": ("0.5", 0.5),
        "prefix_cache": ("false", False),
        "prefix_gb": ("3", 3.0),
        "max_image_pixels": ("1000", 1000),
        "cache_salt": ("tenant", "tenant"),
        "checkpoint_layers": ("4,8", (4, 8)),
        "disk_path": ("/var/cache/vlcache", "/var/cache/vlcache"),
        "disk_gb": ("7", 7.0),
        "redis_url": ("redis://host", "redis://host"),
        "redis_gb": ("9", 9.0),
        "redis_ttl_s": ("60", 60.0),
        "store_dtype": ("int8", "int8"),
        "profile": ("profile.json", "profile.json"),
        "capture": ("neutral", "neutral"),
        "always_reuse": ("true", True),
    }[option]
    file_value = "[4, 8]" if option == "checkpoint_layers" else written
    expected = dataclasses.replace(Config(), **{option: value})
    assert expected != Config()
    assert load_config({}, write(tmp_path, f"{option}: {file_value}")) == expected
    assert load_config({f"VLCACHE_{option.upper()}": written}) == expected
    assert load_config({}, **{option: value}) == expected
    result = getattr(load_config({f"VLCACHE_{option.upper()}": written}), option)
    assert type(result) is type(getattr(Config(), option))


def test_the_environment_names_the_file_and_an_argument_names_another(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    named, given = write(tmp_path, "policy: full"), write(tmp_path / "other", "policy: none")
    assert load_config({"VLCACHE_CONFIG": str(named)}).policy == "full"
    assert load_config({"VLCACHE_CONFIG": str(named)}, given).policy == "none"


def test_the_process_environment_is_read_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLCACHE_CACHE_SALT", "from the process")
    assert load_config().cache_salt == "from the process"


def test_an_argument_that_is_none_is_not_given() -> None:
    assert load_config({"VLCACHE_POLICY": "full"}, policy=None).policy == "full"


def test_variables_of_other_programs_are_left_alone() -> None:
    assert load_config({"PATH": "/bin", "VLCACHED_POLICY": "x", "POLICY": "full"}) == Config()


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "---\n"])
def test_an_empty_file_sets_nothing(tmp_path: Path, text: str) -> None:
    assert load_config({}, write(tmp_path, text)) == Config()


@pytest.mark.parametrize(
    ("wrong", "near"), [("polcy", "policy"), ("memory_GB", "memory_gb"), ("cache-salt", "cache_salt")]
)
def test_unknown_options_in_a_file_are_told_the_nearest(tmp_path: Path, wrong: str, near: str) -> None:
    message = refusal(file=write(tmp_path, f"{wrong}: 1"))
    assert repr(wrong) in message
    assert f"did you mean {near}?" in message
    assert "vlcache.yaml" in message


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("VLCACHE_POLCY", "policy"), ("VLCACHE_MEMORY", "memory_gb"), ("VLCACHE_PREFIXCACHE", "prefix_cache")],
)
def test_unknown_options_in_the_environment_are_told_the_nearest(wrong: str, near: str) -> None:
    message = refusal(environ={wrong: "1"})
    assert wrong in message
    assert f"did you mean VLCACHE_{near.upper()}?" in message
    assert "environment" in message


@pytest.mark.parametrize(("wrong", "near"), [("polices", "policy"), ("max_pixels", "max_image_pixels")])
def test_unknown_arguments_are_told_the_nearest(wrong: str, near: str) -> None:
    message = refusal(**{wrong: 1})
    assert repr(wrong) in message
    assert f"did you mean {near}?" in message
    assert "arguments" in message


def test_an_option_near_none_is_told_all(tmp_path: Path) -> None:
    for message in (refusal(zzz=1), refusal(environ={"VLCACHE_ZZZ": "1"}), refusal(file=write(tmp_path, "7: 1"))):
        assert all(name in message for name in OPTIONS)


def test_an_empty_variable_counts_as_not_set() -> None:
    assert load_config({"VLCACHE_POLICY": "", "VLCACHE_MEMORY_GB": "", "VLCACHE_CACHE_SALT": ""}) == Config()


WRONG_TEXT = [
    ("memory_gb", "four"),
    ("memory_gb", "nan"),
    ("prefix_gb", "inf"),
    ("prefix_gb", "4 GB"),
    ("prefix_cache", "maybe"),
    ("max_image_pixels", "1.5"),
    ("max_image_pixels", "64M"),
    ("checkpoint_layers", "4;8"),
    ("checkpoint_layers", "4,x"),
]


@pytest.mark.parametrize(("option", "text"), WRONG_TEXT)
def test_text_of_the_wrong_kind_is_refused_from_the_environment_and_as_an_argument(option: str, text: str) -> None:
    for message in (refusal(environ={f"VLCACHE_{option.upper()}": text}), refusal(**{option: text})):
        assert option in message
        assert text in message


WRONG_VALUES = [
    ("policy", 3),
    ("policy", ["full"]),
    ("memory_gb", True),
    ("memory_gb", [1]),
    ("prefix_cache", 2),
    ("prefix_cache", 0.5),
    ("prefix_cache", "perhaps"),
    ("max_image_pixels", 1.5),
    ("max_image_pixels", True),
    ("cache_salt", 5),
    ("cache_salt", {"a": 1}),
    ("checkpoint_layers", 4),
    ("checkpoint_layers", [1.5]),
    ("checkpoint_layers", [True]),
    ("checkpoint_layers", ["x"]),
    ("checkpoint_layers", {4: "x"}),
]


@pytest.mark.parametrize(("option", "value"), WRONG_VALUES)
def test_values_of_the_wrong_kind_are_refused_from_a_file_and_as_an_argument(
    tmp_path: Path, option: str, value: object
) -> None:
    for message in (refusal(file=write(tmp_path, f"{option}: {value!r}")), refusal(**{option: value})):
        assert f"option {option}" in message
        assert (repr(value) in message) is (option != "cache_salt")


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_without_a_value_in_a_file_is_refused(tmp_path: Path, option: str) -> None:
    assert f"option {option}" in refusal(file=write(tmp_path, f"{option}:\n"))


@pytest.mark.parametrize("text", ["1", "true", "TRUE", "Yes", "on"])
def test_words_for_true(text: str) -> None:
    assert load_config({"VLCACHE_PREFIX_CACHE": text}).prefix_cache is True


@pytest.mark.parametrize("text", ["0", "false", "False", "NO", "off"])
def test_words_for_false(text: str) -> None:
    assert load_config({"VLCACHE_PREFIX_CACHE": text}).prefix_cache is False


@pytest.mark.parametrize(("text", "layers"), [("", ()), ("4", (4,)), ("4,8", (4, 8)), ("4, 8, 12", (4, 8, 12))])
def test_tuples_from_the_environment(text: str, layers: tuple[int, ...]) -> None:
    assert load_config({"VLCACHE_CHECKPOINT_LAYERS": text}).checkpoint_layers == layers


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("memory_gb", -1, "negative"),
        ("prefix_gb", -0.5, "negative"),
        ("disk_gb", -1, "negative"),
        ("redis_ttl_s", -1, "no duration"),
        ("store_dtype", "int4", "known are raw, int8, fp8"),
        ("capture", "lazy", "known are observed, neutral"),
        ("max_image_pixels", -1, "negative"),
        ("checkpoint_layers", (0, 4), "layer 0"),
        ("policy", "prefx:0.1", "did you mean prefix?"),
        ("policy", "prefix:2", "between 0 and 1"),
    ],
)
def test_values_out_of_range_are_refused_in_every_layer(tmp_path: Path, option: str, value: Any, told: str) -> None:
    listed = list(value) if isinstance(value, tuple) else value
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    name = f"VLCACHE_{option.upper()}"
    file = write(tmp_path, f"{option}: {listed}")
    for message in (refusal(file=file), refusal(environ={name: text}), refusal(**{option: value})):
        assert option in message
        assert told in message
    with pytest.raises(ConfigError, match=told.replace("?", r"\?")):
        Config(**{option: value})


def test_a_missing_file_and_a_directory_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.yaml", tmp_path):
        for message in (refusal(file=path), refusal(environ={"VLCACHE_CONFIG": str(path)})):
            assert str(path) in message


@pytest.mark.parametrize(
    "text",
    [
        "policy: [full",
        "policy: full\n\tmemory_gb: 1",
        "%",
        "a: b: c",
        "policy: full\x00",
        b"policy: \xff\xfe\x80",
        "policy: 2026-13-45",
    ],
    ids=["bracket", "tab", "directive", "nested", "nul", "not utf-8", "impossible date"],
)
def test_a_file_that_is_not_yaml_is_named(tmp_path: Path, text: str | bytes) -> None:
    path = write(tmp_path, text)
    assert str(path) in refusal(file=path)


@pytest.mark.parametrize(("text", "kind"), [("- policy", "list"), ("full", "str"), ("3", "int")])
def test_a_file_that_is_no_mapping_is_told_so(tmp_path: Path, text: str, kind: str) -> None:
    message = refusal(file=write(tmp_path, text))
    assert kind in message
    assert "option: value" in message


@pytest.mark.parametrize("option", OPTIONS)
def test_a_configuration_is_frozen(option: str) -> None:
    config = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, option, getattr(config, option))
    assert hash(config) == hash(Config())


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("", ""),
        ("redis://host", "redis://host"),
        ("rediss://me:hush@host:6379/0", "rediss://host:6379"),
        ("redis://host/0?password=hush", "redis://host"),
        ("redis://:hu@sh@host:1/0", "redis://host:1"),
        ("redis://:hush/x@host", "set"),
        ("redis://host:hush", "set"),
        ("redis://hush/x@host", "set"),
        ("redis://me:p@hush/word@host:6379", "set"),
        ("unix://me:hush@/run/redis.sock", "set"),
        ("hush", "set"),
    ],
)
def test_secrets_are_not_shown(url: str, shown: str) -> None:
    config = Config(redis_url=url, cache_salt="pepper")
    assert config.shown()["redis_url"] == shown
    assert config.shown()["cache_salt"] == "set"
    for text in (repr(config), str(config.shown())):
        assert "hush" not in text
        assert "pepper" not in text


def test_an_error_does_not_repeat_a_secret(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("cache_salt: 123456")
    with pytest.raises(ConfigError, match="what is given is not a str") as error:
        load_config({}, file)
    assert "123456" not in str(error.value)
