"""What may leave the team: everything but secrets, known ones and what looks like one."""

from collections.abc import Iterator

import pytest

from tasks import hidden
from tasks.redaction import (
    hide_secrets_of,
    parse_environment,
    redacted,
    redacted_document,
    redacted_environment,
)
from tasks.topology import Fabric, Secrets, files
from tests.unit.specs import spec


@pytest.fixture(autouse=True)
def values(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(hidden, "_values", set())
    yield


SECRETS = Secrets(
    api_key="the key of the API", environment={"SITE_WORD": 'it\'s "quoted"', "PIN": "4711"}
)


def node_env() -> str:
    """As the product writes it."""
    cluster = spec(environment={"VLLM_LOGGING_LEVEL": "DEBUG"})
    made = files(cluster, cluster.head, Fabric(interface="eth1"), SECRETS)
    return made.environment.decode()


def test_a_node_s_variables_keep_their_names() -> None:
    lines = redacted_environment(node_env()).splitlines()
    assert "export GLOO_SOCKET_IFNAME=eth1" in lines
    assert "export VLLM_LOGGING_LEVEL=DEBUG" in lines
    assert {line for line in lines if line.endswith("=***")} == {
        "export SITE_WORD=***",
        "export PIN=***",
        "export VLLM_API_KEY=***",
    }


def test_what_a_node_knows_is_hidden_everywhere() -> None:
    hide_secrets_of(node_env())
    assert redacted('it said: it\'s "quoted"; the key of the API') == "it said: ***; ***"
    # What is no secret is left.
    assert redacted("bound to eth1 at 10.77.0.1, DEBUG") == "bound to eth1 at 10.77.0.1, DEBUG"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("export A='unclosed\n", id="an open quote"),
        pytest.param("export A=1; rm -rf B\n", id="another program"),
        pytest.param("export 'A B'=1\n", id="no name"),
    ],
)
def test_a_file_that_is_not_as_we_write_it_is_not_shown(text: str) -> None:
    assert parse_environment(text) is None
    assert redacted_environment(text) == "it is not as sparkrail writes it, and so not shown\n"
    hide_secrets_of(text)


def test_a_file_without_a_list_of_what_may_show_shows_nothing() -> None:
    assert redacted_environment("export A=eth1\n") == "export A=***\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Authorization: Bearer abcdef123456==", "Authorization: Bearer ***"),
        ("token hf_abcdefghijklmnop", "token hf_***"),
        ("http_proxy=http://joe:secret@proxy:3128/", "http_proxy=http://joe:***@proxy:3128/"),
        ("vllm serve /m --api-key abc --port 8000", "vllm serve /m --api-key *** --port 8000"),
        ("vllm serve /m --api-key=abc", "vllm serve /m --api-key=***"),
        ("['--hf-token', 'abc', '--port']", "['--hf-token', '***', '--port']"),
        ("SITE_PASSWORD=abc GLOO_SOCKET_IFNAME=eth1", "SITE_PASSWORD=*** GLOO_SOCKET_IFNAME=eth1"),
        ("{'HF_TOKEN': 'abc', 'A': 'b'}", "{'HF_TOKEN': '***', 'A': 'b'}"),
        ('{"HF_TOKEN": "abc"}', '{"HF_TOKEN": "***"}'),
        (
            "x\n-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n-----END OPENSSH PRIVATE KEY-----\ny",
            "x\n***\ny",
        ),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc", "***"),
        # And what only sounds like one.
        (
            "--max-num-batched-tokens=2048 --tokenizer /models/tiny",
            "--max-num-batched-tokens=2048 --tokenizer /models/tiny",
        ),
        ("vllm:generation_tokens_total 62.0", "vllm:generation_tokens_total 62.0"),
        ("sk-learn is no key", "sk-learn is no key"),
    ],
)
def test_what_looks_like_a_secret(text: str, shown: str) -> None:
    assert redacted(text) == shown


def test_a_document_is_redacted_before_it_is_quoted() -> None:
    hidden.hide(['pass"word\\'])
    document = {"Env": ['A=pass"word\\', "B=1"], "n": 7, 'of pass"word\\': None}
    assert redacted_document(document) == {"Env": ["A=***", "B=1"], "n": 7, "of ***": None}
