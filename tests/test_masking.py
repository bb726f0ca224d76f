"""What is masked: by names, in URLs, in overrides, in texts, in diffs; and what is left as it is."""

import html
import json
import logging
import sys
from typing import Any

import pytest

from wellfed import masking
from wellfed.masking import (
    hidden,
    is_secret_name,
    learn,
    masked,
    masked_command,
    masked_override,
    secrets_of,
)

SECRET = [
    "apikey",
    "api_key",
    "apiKey",
    "API_KEY",
    "api-key",
    "x-api-key",
    "accessKey",
    "access_key",
    "aws_access_key_id",
    "AWSSecretAccessKey",
    "hfToken",
    "hf_token",
    "token",
    "access_token",
    "authToken",
    "apiTokens",
    "tokens_secret",
    "pwd",
    "db_pwd",
    "passwd",
    "password",
    "dbPassword",
    "passwords",
    "secret",
    "client_secret",
    "clientSecret",
    "secretkey",
    "auth",
    "oauth",
    "Authorization",
    "proxyAuthorization",
    "dsn",
    "sentry_dsn",
    "passphrase",
    "cookie",
    "cookies",
    "bearer",
    "credential",
    "credentials",
    "private_key",
    "privatekey",
    "sessionId",
    "session_token",
    "jwt",
    "db_pass",
    "wandb_key",
    "signing_keys",
]
PLAIN = [
    "tokenizer",
    "num_tokens",
    "max_tokens",
    "max_token",
    "n_tokens",
    "tokens",
    "per_token",
    "pad_token",
    "bos_token",
    "cls_token",
    "mask_token",
    "author",
    "authors",
    "key",
    "keys",
    "sort_keys",
    "sort_key",
    "label_key",
    "image_key",
    "authority",
    "passes",
    "forward_pass",
    "compass",
    "monkey",
    "keyboard",
    "secretary",
    "token_id",
    "token_type",
    "auth_url",
    "auth_mode",
    "key_file",
    "password_file",
    "session",
    "sessions",
    "class_token",
    "tokenized",
    "token_dim",
    "key_dim",
    "lr",
    "dataset",
    "seed",
    "name",
    "path",
]


@pytest.fixture(autouse=True)
def nothing_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "_learnt", set())
    monkeypatch.setattr(masking, "_pattern", None)


@pytest.mark.parametrize("name", SECRET)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)
    assert masked({name: "abc"}) == {name: "***"}
    assert masked({name: 123}) == {name: "***"}


@pytest.mark.parametrize("name", PLAIN)
def test_names_of_what_is_none(name: str) -> None:
    assert not is_secret_name(name)
    assert masked({name: "abc"}) == {name: "abc"}
    assert masked({name: 123}) == {name: 123}


def test_a_key_that_looks_drawn_at_random_is_one() -> None:
    assert masked({"key": "a8f5f167f44f4964e6c998dee827110c", "session": "train"}) == {"key": "***", "session": "train"}


def test_trees() -> None:
    tree = {
        "auth": {"user": "bob", "pins": [1234, "x"], "_target_": "torch.nn.X", "is_on": True, "none": None},
        "api_tokens": ["a1", "b2"],
        "list": [{"password": "p"}, {"b": 1}],
        "token": "${oc.env:T}",
        "empty": {"password": "", "secret": None},
    }
    assert masked(tree) == {
        "auth": {"user": "***", "pins": ["***", "***"], "_target_": "torch.nn.X", "is_on": True, "none": None},
        "api_tokens": ["***", "***"],
        "list": [{"password": "***"}, {"b": 1}],
        "token": "${oc.env:T}",
        "empty": {"password": "", "secret": None},
    }
    assert secrets_of(tree) == {"bob", "1234", "x", "a1", "b2", "p"}


def test_what_comes_from_a_secret_variable_is_one() -> None:
    sources = {"header": "Token ${oc.env:HF_TOKEN}", "home": "${oc.env:HOME}"}
    assert masked({"header": "Token x", "home": "/root"}, sources) == {"header": "***", "home": "/root"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgres://bob:hunter2@db:5432/x", "postgres://bob:***@db:5432/x"),
        ("redis://:hunter2@h", "redis://:***@h"),
        ("a https://u:p@ss@h/p b", "a https://u:***@h/p b"),
        ("https://ghp0123456789abcdef@github.com/a", "https://***@github.com/a"),
        ("https://h/p?sv=1&sig=a%2Fb&x=2", "https://h/p?sv=1&sig=***&x=2"),
        ("https://h/p?token=abc#top", "https://h/p?token=***#top"),
        ("https://h/?X-Amz-Signature=ab&X-Amz-Date=1", "https://h/?X-Amz-Signature=***&X-Amz-Date=1"),
        ("https://h:8080/p?max_tokens=5", "https://h:8080/p?max_tokens=5"),
        ("https://h/#access_token=abc&expires_in=9", "https://h/#access_token=***&expires_in=9"),
        ("https://h/p#section=2, #key", "https://h/p#section=2, #key"),
        ("https://shorttok9@h/x", "https://***@h/x"),
        ("https://git@h/x https://$TOKEN@h https://${token}@h", "https://git@h/x https://$TOKEN@h https://${token}@h"),
        ("ssh://bob@h/x https://h/@bob", "ssh://bob@h/x https://h/@bob"),
        ("a https://hooks.slack.com/services/T0AB/B0CD/e5FgH b", "a https://hooks.slack.com/services/*** b"),
        ("https://slack.com/services/help", "https://slack.com/services/help"),
        ("with pypi-AgEIcHlwaS5vcmcCJDk2N2 now", "with *** now"),
        ("pypi-AgEIcHlw, pypi-server-and-its-mirror", "pypi-AgEIcHlw, pypi-server-and-its-mirror"),
        ("wandb_v1_a1B2c3D4e5F6g7H8 wandb_v1_api", "*** wandb_v1_api"),
        ("sk_live_4eC39HqLyjWD rk_test_4eC39HqLyjWD sk_live_x", "*** *** sk_live_x"),
        ("git@github.com:a/b.git, C://x", "git@github.com:a/b.git, C://x"),
        ("Authorization: Bearer abc.def123", "Authorization: Bearer ***"),
        ("used hf_abcdefghijklmnopqrstuvwx today", "used *** today"),
    ],
)
def test_texts(text: str, shown: str) -> None:
    assert hidden(text) == shown
    assert masked({"url": text}) == {"url": shown}


VALUES = ["pa\"ss\\w'rd", "gr\xfc\xdfe-1234", "line1\nline2!", "a&b<c>d12", "12345678", "p w/=?%20", "abcdefgh"]


@pytest.mark.parametrize("value", VALUES)
def test_what_was_masked_once_is_masked_in_any_text(value: str) -> None:
    learn({value})
    forms = [value, json.dumps(value), json.dumps(value, ensure_ascii=False), repr(value), html.escape(value)]
    for form in forms:
        assert (
            hidden(f"say {form}!")
            == f"say {form.replace(form.strip(chr(34) + chr(39)) if form is not value else value, '***')}!"
        )
    assert hidden(f"x{value}y") == (
        f"x{value}y" if value[0].isalnum() and value[-1].isalnum() else hidden(f"x{value}y")
    )


def test_short_or_common_values_are_left_to_their_names() -> None:
    learn({"train", "12", "basic", "default"})
    assert hidden("train 12 basic default") == "train 12 basic default"
    learn({"123456"})
    assert hidden("1234567 0.123456 123456") == "1234567 0.123456 ***"


def test_a_log_line_and_its_traceback() -> None:
    learn({"hunter2!"})
    try:
        raise ValueError("refused hunter2!")
    except ValueError:
        entry = logging.LogRecord("a", logging.INFO, "f", 1, "with %s", ("hunter2!",), sys.exc_info())
    text = masking.MaskedFormatter("%(message)s").format(entry)
    assert "with ***" in text
    assert "refused ***" in text
    assert "hunter2" not in text


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("a.token=x", "a.token='***'"),
        ("a.token=5", "a.token='***'"),
        ("a.max_token=5", "a.max_token=5"),
        ("+a.apiKey='x y'", "+a.apiKey='***'"),
        ('++a.pwd="x"', "++a.pwd='***'"),
        ("a.token=${oc.env:T}", "a.token=${oc.env:T}"),
        ("a.token=${oc.env:T,${oc.env:U}}", "a.token=${oc.env:T,${oc.env:U}}"),
        ("a.token=${oc.env:T}x", "a.token='***'"),
        ("a={password: x, b: 2}", "a='***'"),
        ("+a.x={api_key: x}", "+a.x='***'"),
        ("a={'api_key': x}", "a='***'"),
        ('a={"api_key":"x"}', "a='***'"),
        ("a={b: {api_key: 'it, is'}, token: ${oc.env:T}}", "a='***'"),
        ('a=[{secret:"x\\" y"},{b:1}]', "a='***'"),
        ("a={max_tokens: 5, tokens: [x]}", "a={max_tokens: 5, tokens: [x]}"),
        ("a={api_tokens: [x, y], auth: {user: u, n: 1}}", "a='***'"),
        ("a.credentials={user: u}", "a.credentials='***'"),
        ("a.credentials=[u,1]", "a.credentials='***'"),
        ("a={password: str(12), b: 1}", "a='***'"),
        ("a=[1,2]", "a=[1,2]"),
        ("a={b: [1, {c: 2}], d: }", "a={b: [1, {c: 2}], d: }"),
        ("a.url=https://u:pw@h/x", "a.url=https://u:***@h/x"),
        ("a={url: 'https://u:pw@h/x?sig=ab'}", "a={url: 'https://u:***@h/x?sig=***'}"),
        ("loader=balanced", "loader=balanced"),
        ("~a.token", "~a.token"),
    ],
)
def test_overrides(typed: str, shown: str) -> None:
    assert masked_override(typed) == shown


def test_hidden_in_nested_facts() -> None:
    learn({"hunter2!"})
    facts: dict[str, Any] = {"a": ["hunter2!", 1], "b": ("x", {"c": "hunter2!"}), "d": 1.5}
    assert masking.hidden_in(facts) == {"a": ["***", 1], "b": ("x", {"c": "***"}), "d": 1.5}


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["python", "train.py", "loader=auto", "--lr", "0.1"], ["python", "train.py", "loader=auto", "--lr", "0.1"]),
        (["x", "--api-key", "abcdefghij", "--epochs", "3"], ["x", "--api-key", "***", "--epochs", "3"]),
        (["x", "--api-key=abcdefghij", "logger.password=hunter22"], ["x", "--api-key='***'", "logger.password='***'"]),
        (["x", "--password", "--verbose", "3"], ["x", "--password", "--verbose", "3"]),
        (["sh", "-c", "x --token abcdefghij --lr 1"], ["sh", "-c", "***"]),
        (["x", "postgres://me:hunter22@host/db"], ["x", "postgres://me:***@host/db"]),
        (["x", "--max-tokens", "100"], ["x", "--max-tokens", "100"]),
        (["curl", "-H", "Authorization: Bearer abc123def456ghi"], ["curl", "-H", "***"]),
        (["x", "--config", '{"api_key":"x9x9x9x9"}'], ["x", "--config", "***"]),
        (["x", "--token", "-Ab3deadbeef99"], ["x", "--token", "***"]),
        ([], []),
    ],
)
def test_the_arguments_of_a_process_have_no_secrets(arguments: list[str], shown: list[str]) -> None:
    assert masked_command(arguments) == shown
